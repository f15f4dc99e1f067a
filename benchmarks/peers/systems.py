"""Peers' partitioners as installed: layer times and a number of stages -> first layer of all stages but one."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Partitioner", "installed"]

Partitioner = Callable[[Sequence[float], int, int], tuple[int, ...]]
"""(layer times in seconds, stages, micro-batches) -> cuts"""
ALPA_LAYERS = 40
"""layers up to which Alpa's dynamic programme ends within a minute here"""


def torchgpipe() -> Partitioner:
    from torchgpipe.balance.blockpartition import solve

    def cut(times: Sequence[float], stages: int, microbatches: int) -> tuple[int, ...]:  # noqa: ARG001
        blocks = solve(list(times), stages)
        return tuple(int(at) for at in np.cumsum([len(block) for block in blocks])[:-1])

    return cut


def deepspeed() -> Partitioner:
    from deepspeed.runtime.utils import partition_balanced

    def cut(times: Sequence[float], stages: int, microbatches: int) -> tuple[int, ...]:  # noqa: ARG001
        return tuple(int(at) for at in partition_balanced(list(times), stages)[1:-1])

    return cut


def colossal() -> Partitioner:
    """Whole numbers only, as it bisects by //: microseconds."""
    names = ("_binary_partition", "_heap_addition", "_calc_partitions", "_binary_search")
    space = functions("colossalai", "legacy/pipeline/utils.py", names)

    def cut(times: Sequence[float], stages: int, microbatches: int) -> tuple[int, ...]:  # noqa: ARG001
        intervals = space["_binary_search"]([round(time * 1e6) for time in times], stages)
        return tuple(int(start) for start, _ in intervals[1:])

    return cut


def alpa() -> Partitioner:
    """Its dynamic programme, a stage per accelerator; it counts M and the fill of the pipeline."""
    import numba

    class Timer:
        def start(self) -> None: ...
        def stop(self) -> None: ...

    names = ("training_dp_impl_2", "training_dp_2", "get_optimal_submeshes")
    space = functions(
        "alpa",
        "pipeline_parallel/stage_construction.py",
        names,
        maybe_numba_jit=numba.njit,
        timers=lambda _: Timer(),
        np=np,
    )

    def cut(times: Sequence[float], stages: int, microbatches: int) -> tuple[int, ...]:
        layers = len(times)
        sums = np.concatenate([[0.0], np.cumsum(times)])
        cost = np.full((layers, layers, 1, 1), np.inf)
        for first in range(layers):
            cost[first, first:, 0, 0] = sums[first + 1 :] - sums[first]
        behind = np.full((layers, layers, 1, 1), 4096)
        _, solution = space["training_dp_2"](stages, microbatches, ((1, 1),), cost, behind)
        return tuple(int(first) for (first, _), *_ in solution[1:])

    cut([1.0, 2.0, 3.0], 2, 4)  # numba compiles now, not while it is timed
    return cut


def functions(package: str, file: str, names: Sequence[str], **given: Any) -> dict[str, Any]:
    """Functions of an installed package's file, without what its other imports need (GPUs, JAX, Ray)."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(package)
    text = (Path(next(iter(found.submodule_search_locations))) / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = set(names) - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing:
        raise ImportError(f"{package} has no {', '.join(sorted(missing))}")
    import heapq
    import typing

    space: dict[str, Any] = {"heapq": heapq, "List": list, **vars(typing), **given}
    exec(compile(tree, f"{package}/{file}", "exec"), space)
    return space


MAKERS = {"torchgpipe": torchgpipe, "deepspeed": deepspeed, "colossalai": colossal, "alpa": alpa}


def installed() -> tuple[dict[str, Partitioner], dict[str, str]]:
    """The peers that are there, and every one's version or why it is not."""
    found, versions = {}, {}
    for name, make in MAKERS.items():
        try:
            found[name] = make()
            versions[name] = importlib.metadata.version(name)
        except ImportError as error:
            versions[name] = f"not installed: {error}"
    return found, versions

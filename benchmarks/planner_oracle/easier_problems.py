"""Pairs of planning problems of which the second allows every plan of the first, at no less speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from random_problems import Problem, problem_of

from bapipe.hardware.cluster import Accelerator, Link

__all__ = ["Check", "check_of"]

_HOLD_MORE = ("gpipe", "1f1b-so", "1f1b-sno")
"""schedules that hold more of a larger batch by their rule, so that one may not fit: there 1f1b is asked for"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """`more` has more memory, faster links, one more accelerator or a multiple of the batch."""

    kind: str
    less: Problem
    more: Problem


def check_of(seed: int) -> Check:
    """The four kinds in turn, on random problems of any kind."""
    rng = np.random.default_rng([seed, 1])
    problem = problem_of(100_000 + seed)
    kind, change = _CHANGES[seed % len(_CHANGES)]
    if kind == "batch" and problem.request.schedule in _HOLD_MORE:
        problem = replace(problem, request=replace(problem.request, schedule="1f1b"))
    return Check(kind=kind, less=problem, more=change(problem, rng))


def _more_memory(problem: Problem, rng: np.random.Generator) -> Problem:
    cluster, factor = problem.cluster, rng.choice([1.03, 1.1, 1.3, 2.0])
    types = {name: replace(own, memory=own.memory * factor) for name, own in cluster.types.items()}
    return replace(problem, cluster=replace(cluster, types=types))


def _faster_links(problem: Problem, rng: np.random.Generator) -> Problem:
    factor = rng.choice([1.1, 1.5, 3.0, 10.0])

    def faster(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * factor)

    return replace(problem, cluster=problem.cluster.with_links(faster))


def _one_more_accelerator(problem: Problem, rng: np.random.Generator) -> Problem:
    cluster, request = problem.cluster, problem.request
    like = cluster.accelerators[int(rng.integers(len(cluster)))]
    added = Accelerator(name=f"{like.node}/more", type=like.type, node=like.node)
    return replace(problem, cluster=replace(cluster, accelerators=(*cluster.accelerators, added)), request=request)


def _multiple_of_the_batch(problem: Problem, rng: np.random.Generator) -> Problem:
    assert problem.request.global_batch is not None
    request, times = problem.request, int(rng.integers(2, 4))
    return replace(problem, request=replace(request, global_batch=times * problem.request.global_batch))


_CHANGES: tuple[tuple[str, Callable[[Problem, np.random.Generator], Problem]], ...] = (
    ("memory", _more_memory),
    ("links", _faster_links),
    ("accelerators", _one_more_accelerator),
    ("batch", _multiple_of_the_batch),
)

"""A chain of which some units recompute: what that saves in memory and costs in time.

A run of consecutive units that recomputes (activation checkpointing) keeps only its input per micro-batch; its
forward is repeated right before its backward. Of a chain with such runs a unit holds and takes

    saved activations    of a run's first unit the run's input, of its others nothing
    backward             its own, and its forward once more
    workspace            while it works, also what the run has saved so far, from its first unit on

so that stages, memory and simulation go by it as by any other chain.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats, Run

__all__ = ["as_runs", "crosses_runs", "may_recompute", "recomputing", "repeated_forward", "run_inputs"]

Bools = NDArray[np.bool_]


def may_recompute(chain: Chain) -> Bools:
    """Of each unit, whether it may: parts of a layer that two stages share do not."""
    return np.array([unit.whole for unit in chain.units])


def as_runs(units: Iterable[int]) -> tuple[Run, ...]:
    """Each unit by itself."""
    return tuple((unit, unit) for unit in sorted(set(units)))


def run_inputs(chain: Chain) -> Floats:
    """Bytes that a run which begins with each unit keeps: what the unit before made.

    What came past that unit is booked to the first that received it, which keeps it by its own figures.
    """
    passed = np.concatenate([[0.0], chain.passing[:-1]])
    return np.asarray(np.maximum(0.0, chain.input_bytes - passed), dtype=np.float64)


@functools.lru_cache(maxsize=512)
def recomputing(chain: Chain, runs: tuple[Run, ...]) -> Chain:
    """The chain, of which none recomputes yet, with these runs of units recomputing: first and last, included."""
    if not runs:
        return chain
    assert not chain.recompute, "runs are chosen for the chain as it is without any"
    saved, backward = chain.saved_activations.copy(), chain.backward.copy()
    spaces = {
        name: getattr(chain, name).copy()
        for name in ("layer_workspace", "forward_workspace", "backward_workspace")
    }
    inputs, before = run_inputs(chain), chain.saved_before.copy()
    known = np.where(np.isfinite(chain.kept_input), chain.kept_input, 0.0)
    for first, last in runs:
        own = slice(first, last + 1)
        kept = float(inputs[first])
        shared = min(kept, float(known[first]), float(chain.saved_activations[first]))
        held = np.cumsum(chain.saved_activations[own]) - shared
        if last + 1 < len(chain):
            # What only the run's last unit saves of what it sends counts with the unit after it.
            after = float(min(chain.saved_before[last + 1], saved[last + 1]))
            held[-1] += after
            saved[last + 1] -= after
            before[last + 1] = 0.0
        most = np.maximum(chain.forward_workspace[own], chain.backward_workspace[own])
        spaces["backward_workspace"][own] = most + held
        spaces["layer_workspace"][own] = chain.layer_workspace[own] + held
        spaces["forward_workspace"][own] = chain.forward_workspace[own] + chain.saved_activations[own]
        saved[own] = 0.0
        saved[first] = kept
        before[own] = 0.0
        backward[:, own] += chain.forward[:, own]
    return replace(
        chain,
        saved_activations=saved,
        saved_before=before,
        backward=backward,
        workspace=max(chain.workspace, float(spaces["layer_workspace"].max()) + float(chain.library.max())),
        recompute=tuple(runs),
        **spaces,
    )


def repeated_forward(chain: Chain, first: int, last: int, row: int = 0) -> float:
    """Seconds of the forwards that units `first` to `last` repeat, on the type of this row."""
    runs = (run for run in chain.recompute if first <= run[0] and run[1] <= last)
    return float(sum(chain.forward[row, begin : end + 1].sum() for begin, end in runs))


def crosses_runs(chain: Chain, cuts: Iterable[int]) -> bool:
    """Whether a cut after one of these units lies inside a run that recomputes."""
    return any(first <= cut < last for cut in cuts for first, last in chain.recompute)

"""Intra-layer partition (the paper's third step): move channels of a boundary layer between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapipe.costs.segments import Chain, make_chain
from bapipe.planner.partition.paper.stage_cuts import Cuts, hill_climb, prefix_work, stage_times, starts
from bapipe.planner.tuning import DEFAULT_TUNING

__all__ = ["intra_layer", "refine", "translate"]

_TIMED = 2
"""parts in which profiles time a layer"""


def refine(chain: Chain, layers: Sequence[int], slices: int = DEFAULT_TUNING.slices) -> Chain:
    """The chain with these layers, where they may be split, cut into so many slices.

    Output channels only as they were timed, if they were: a library picks another kernel for another number of
    them, and three quarters of a convolution may take longer than all of it.
    """
    timed = any(chain.profile.table(name).part_forward is not None for name in chain.types)
    splits = {layer: chain.profile.layers[layer].split for layer in layers}
    split = {
        layer: _TIMED if timed and rule.by == "output channels" else slices
        for layer, rule in splits.items()
        if rule is not None
    }
    return make_chain(chain.profile, chain.types, chain.microbatch, split=split)


def translate(cuts: Cuts, chain: Chain, finer: Chain) -> Cuts:
    """The same cuts, by layer, on a finer chain."""
    last_of = {unit.layer: index for index, unit in enumerate(finer.units)}
    return tuple(last_of[chain.units[cut].layer] for cut in cuts)


def intra_layer(
    chain: Chain,
    rows: Sequence[int],
    cuts: Cuts,
    transfer_of: Callable[[Chain], Callable[[int], float]],
    slices: int = DEFAULT_TUNING.slices,
) -> tuple[Chain, Cuts]:
    """Balance further by moving slices of the layers next to each cut, transfers within the longest stage.

    Returns the finer chain and its cuts; the chain itself if no boundary layer may be split or nothing is gained.
    """
    beside = {chain.units[cut].layer for cut in cuts[:-1]} | {
        chain.units[first].layer for first in starts(cuts)[1:]
    }
    finer = refine(chain, sorted(beside), slices)
    if len(finer) == len(chain):
        return chain, cuts
    prefix, transfer = prefix_work(finer), transfer_of(finer)

    def score(trial: Cuts) -> tuple[float, ...]:
        times = stage_times(prefix, rows, trial)
        excess = max(0.0, max((transfer(cut) for cut in trial[:-1]), default=0.0) - max(times))
        return (max(times) + excess, *sorted(times, reverse=True))

    before = translate(cuts, chain, finer)
    after = hill_climb(before, score)
    return (finer, after) if score(after) < score(before) else (chain, cuts)

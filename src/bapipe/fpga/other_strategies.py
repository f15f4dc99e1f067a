"""Other strategies for the same boards: the paper's own steps, and simple rules to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import UnitBytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.fpga.exact_cuts import Run
from bapipe.fpga.fpga_profile import fpga_profile
from bapipe.planner.partition import baselines
from bapipe.planner.partition.paper.balanced import balanced_partition
from bapipe.planner.partition.paper.stage_cuts import Cuts, starts
from bapipe.planner.partition.paper.step_record import Step

__all__ = ["stepwise"]


def stepwise(run: Run, strategy: str) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """Cuts by the paper's steps (bapipe), or by layers or compute alone (uniform, time), and the record of it."""
    types = tuple(dict.fromkeys(board.type for board in run.boards))
    network, b = run.units.network, run.rule.microbatch
    profile = fpga_profile(network, run.boards, dtype="fp16", microbatches=(b,))
    chain = make_chain(profile, types, b)
    rows = [types.index(board.type) for board in run.boards]
    if strategy != "bapipe":
        count = len(chain)
        firsts = (
            baselines.uniform(count, run.depth)
            if strategy == "uniform"
            else baselines.by_time(UnitSeconds.of(chain).work[rows[0]].tolist(), run.depth)
        )
        return _places(run, chain, [first - 1 for first in (*firsts, count)]), ()

    def transfer_of(own: Chain) -> Callable[[int], float]:
        if not run.links:
            return lambda cut: 0.0 * cut
        slowest = min(run.links, key=lambda link: link.bandwidth)
        busy = run.rule.link_period(own.boundary_forward / b, own.boundary_backward / b, slowest).tolist()
        return lambda cut: float(busy[cut])

    def memory_of(own: Chain) -> Callable[[Cuts], list[float]]:
        units = UnitBytes.of(own)

        def needs(cuts: Cuts) -> list[float]:
            return [
                units.held(first, last, 2 + run.copies, run.rule.images(run.depth - index) // b)
                for index, (first, last) in enumerate(zip(starts(cuts), cuts, strict=True))
            ]

        return needs

    balanced = balanced_partition(
        chain,
        rows,
        transfer_of=transfer_of,
        memory_of=memory_of,
        capacity=[board.ram + board.ddr for board in run.boards],
        split_layers=run.parameters.slices > 1,
    )
    return _places(run, balanced.chain, balanced.cuts), balanced.steps


def _places(run: Run, chain: Chain, last: Sequence[int]) -> tuple[int, ...]:
    """The cuts after these units of a chain, kept apart where rounding would make a stage empty."""
    end, depth = len(run.units), len(last)
    places: list[int] = []
    for index, unit in enumerate(last):
        least = places[-1] + 1 if places else 1
        places.append(min(max(_position(run, chain, unit), least), end - (depth - 1 - index)))
    return tuple(places)


def _position(run: Run, chain: Chain, unit: int) -> int:
    """The place after a unit of a chain, rounded to the places where the boards may be cut."""
    held = chain.units[unit]
    first = int(np.searchsorted(run.units.layer, held.layer))
    count = int(run.units.slices[held.layer])
    return first + max(1, round(held.stop / held.of * count))

"""The paper's balanced partition, step by step, with a record of what each step saw and changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapipe.costs.segments import Chain
from bapipe.planner.partition.paper.coarse_grained import coarse_grained, communication_bound
from bapipe.planner.partition.paper.inter_layer import ideal_time, inter_layer
from bapipe.planner.partition.paper.intra_layer import intra_layer
from bapipe.planner.partition.paper.memory_tuning import fit_memory
from bapipe.planner.partition.paper.stage_cuts import Cuts, prefix_work, stage_times
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.units import format_bytes, format_seconds

__all__ = ["Balanced", "balanced_partition"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balanced:
    """The paper's partition and how it came about."""

    chain: Chain
    """the given one, or a finer one where a layer is split"""
    cuts: Cuts
    steps: tuple[Step, ...]
    short: float
    """bytes lacking in all; 0 if every stage fits"""
    ideal: float
    """T of equation (1), seconds per micro-batch"""


def balanced_partition(
    chain: Chain,
    rows: Sequence[int],
    *,
    transfer_of: Callable[[Chain], Callable[[int], float]],
    memory_of: Callable[[Chain], Callable[[Cuts], Sequence[float]]],
    capacity: Sequence[float],
    split_layers: bool = True,
    slices: int = DEFAULT_TUNING.slices,
) -> Balanced:
    """Section "Balanced Partition": inter-layer, then coarse-grained or intra-layer, then memory fine-tuning."""
    prefix = prefix_work(chain)
    ideal = ideal_time([prefix[row][-1] for row in rows])
    cuts = inter_layer(chain, rows)
    longest = max(stage_times(prefix, rows, cuts))
    steps = [
        Step(
            name="inter-layer",
            ran=True,
            numbers=f"a perfect split takes {format_seconds(ideal)} (equation 1)",
            change=f"stages end at layers {_ends(chain, cuts)}; longest {format_seconds(longest)}",
        )
    ]
    transfer = transfer_of(chain)
    slowest = max((transfer(cut) for cut in cuts[:-1]), default=0.0)
    bound = communication_bound(chain, rows, cuts, transfer)
    steps.append(
        Step(
            name="communication test",
            ran=True,
            numbers=f"slowest transfer {format_seconds(slowest)}, longest stage {format_seconds(longest)}",
            change="communication is the bottleneck" if bound else "communication is hidden behind compute",
        )
    )
    allowed: list[bool] | None = None
    if bound:
        before = cuts
        cuts, limit, groups = coarse_grained(chain, rows, transfer, cuts)
        allowed = [transfer(unit) <= limit for unit in range(len(chain) - 1)]
        steps.append(
            Step(
                name="coarse-grained",
                ran=True,
                numbers=f"a_th = bandwidth × {format_seconds(limit)}; {groups} coarse layers of {len(chain)}",
                change=_changed(chain, before, chain, cuts),
            )
        )
        steps.append(
            Step(name="intra-layer", ran=False, numbers="communication is the bottleneck", change="skipped")
        )
    else:
        steps.append(Step(name="coarse-grained", ran=False, numbers="communication is hidden", change="skipped"))
        if split_layers:
            finer, split_cuts = intra_layer(chain, rows, cuts, transfer_of, slices)
            after = max(stage_times(prefix_work(finer), rows, split_cuts))
            change = _changed(chain, cuts, finer, split_cuts)
            numbers = f"longest stage {format_seconds(longest)} -> {format_seconds(after)}"
            steps.append(Step(name="intra-layer", ran=True, numbers=numbers, change=change))
            chain, cuts = finer, split_cuts
        else:
            steps.append(Step(name="intra-layer", ran=False, numbers="layers are kept whole", change="skipped"))
    memory, fine_prefix = memory_of(chain), prefix_work(chain)
    before = cuts
    cuts, short = fit_memory(cuts, memory, capacity, lambda trial: stage_times(fine_prefix, rows, trial), allowed)
    needs = ", ".join(
        f"{format_bytes(need)} of {format_bytes(have)}"
        for need, have in zip(memory(before), capacity, strict=True)
    )
    outcome = _changed(chain, before, chain, cuts) if cuts != before else "every stage fits as it is"
    if short:
        outcome = f"{outcome}; still {format_bytes(short)} short"
    steps.append(Step(name="memory fine-tuning", ran=cuts != before or short > 0, numbers=needs, change=outcome))
    return Balanced(chain=chain, cuts=cuts, steps=tuple(steps), short=short, ideal=ideal)


def _ends(chain: Chain, cuts: Sequence[int]) -> str:
    texts = []
    for cut in cuts[:-1]:
        unit = chain.units[cut]
        texts.append(str(unit.layer) if unit.stop == unit.of else f"{unit.layer} ({unit.stop}/{unit.of})")
    return ", ".join(texts) or "none"


def _changed(before_chain: Chain, before: Cuts, chain: Chain, cuts: Cuts) -> str:
    old, new = _ends(before_chain, before), _ends(chain, cuts)
    return f"cuts after layers {old} -> {new}" if old != new else "nothing"

"""What a pipeline takes without simulating all of its micro-batches.

As many are simulated as show that the times repeat themselves (`bapipe.simulator.steady_state`); the rest follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.cluster_parts import Part, copies_on
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.pipelines import Family, build
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.simulator.steady_state import lag_of, microbatches_needed, steady_state

__all__ = ["Outline", "outline"]

_COMMON = 12
"""rounds of the replicas that the micro-batches left out are a multiple of: of every repetition looked for"""
_ATTEMPTS = 3
"""times that twice as many micro-batches are simulated where no repetition is to be seen"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """A pipeline's time and memory."""

    time: float
    """seconds of a step"""
    evaluation: Evaluation
    """of so many micro-batches as were simulated; its memory is that of all"""

    @property
    def fits(self) -> bool:
        return self.evaluation.short is None


def outline(
    chain: Chain,
    stages: Sequence[StageChoice],
    family: Family,
    microbatches: int,
    *,
    part: Part,
    hardware: Hardware,
    own: Hardware,
    tuning: Tuning = DEFAULT_TUNING,
) -> Outline | None:
    """A copy of these stages on every part, each with so many micro-batches.

    `own` is the hardware of one part. Simulated in full where links are shared, where few micro-batches are enough
    for it, or where the times do not repeat themselves; None where that is too much (`tuning.whole_actions`).
    """

    def made(count: int) -> Candidate:
        return copies_on(part, build(chain, stages, family, count, own, tuning))

    span = math.lcm(*(len(stage.accelerators) for stage in stages)) * _COMMON
    count = min(microbatches, _with_rest(8 * len(stages) + 2 * span, microbatches, span))
    for _ in range(_ATTEMPTS + 1):
        if 2 * count >= microbatches or hardware.cluster.shares_links:
            break
        candidate = made(count)
        needed = microbatches_needed(candidate.schedule)
        if count < needed:
            count = _with_rest(needed + lag_of(candidate.schedule), microbatches, span)
            continue
        evaluation = evaluate(candidate, hardware)
        found = steady_state(evaluation.schedule, evaluation.timeline)
        together = evaluation.schedule.num_microbatches // count
        longer = None if found is None else found.longer(together * (microbatches - count))
        if longer is not None:
            return Outline(time=evaluation.time + longer, evaluation=evaluation)
        count = _with_rest(2 * count, microbatches, span)
    if len(stages) * microbatches > tuning.whole_actions:
        return None
    evaluation = evaluate(made(microbatches), hardware)
    return Outline(time=evaluation.time, evaluation=evaluation)


def _with_rest(least: int, microbatches: int, span: int) -> int:
    """So many micro-batches or more that what is left of them is a multiple of the span."""
    return least + (microbatches - least) % span

"""Times near those of a pipeline's stages, to make orders for.

An order is listed greedily, by what is ready first, so that it may turn out much slower for a small difference of
times: one that is made for times a little off is often quicker, by the true ones, than the one made for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from bapipe.schedule.list_schedule import StageTimes
from bapipe.schedule.looped_order import LoopedStage

__all__ = ["varied_times"]

Stage = TypeVar("Stage", StageTimes, LoopedStage)

_BY = 0.1
"""relative standard deviation of each time"""
_FIELDS = {
    StageTimes: ("forward", "input_gradient", "weight_gradient", "send_forward", "send_backward"),
    LoopedStage: ("forward", "backward", "send_forward", "send_backward"),
}


def varied_times(stages: Sequence[Stage], count: int) -> Iterator[list[Stage]]:
    """So many variations of the stages' times, always the same ones."""
    names = _FIELDS[type(stages[0])]
    generator = np.random.default_rng(0)
    for _ in range(count):
        factors = generator.lognormal(0.0, _BY, (len(stages), len(names))).tolist()
        yield [
            replace(stage, **{name: getattr(stage, name) * by for name, by in zip(names, own, strict=True)})
            for stage, own in zip(stages, factors, strict=True)
        ]

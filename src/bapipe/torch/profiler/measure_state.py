"""What changes while a model is measured: what is known, what was done of it, and the layers at hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from bapipe.errors import BaPipeError, first_line
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer
from bapipe.torch.profiler.layer_timing import Walk, walk
from bapipe.torch.profiler.measure_settings import MeasureSettings
from bapipe.torch.profiler.measurement import Measurement
from bapipe.torch.profiler.measurement_cache import save_measurement

__all__ = ["MeasureState", "Report", "dtype_of", "free_memory", "layer_failure", "warmup_of"]

_SAVE_EVERY = 2.0
"""seconds between two writes of what is known"""

Report = Callable[[str, float], None]
"""what was done, and its share of all that was to do"""


@dataclass(slots=True)
class MeasureState:
    """What changes while measuring."""

    measured: Measurement
    settings: MeasureSettings
    report: Report
    done: float = 0.0
    total: float = 1.0
    saved: float = 0.0
    pieces: dict[tuple[int, int], RunnableLayer] = field(default_factory=dict)
    warm: set[tuple[int, int]] = field(default_factory=set)
    """(layer, size) of the units that have run in this process"""
    step: float = 0.0
    """seconds of a whole step per sample on the host, roughly; 0: not known"""
    walked: tuple[int, Walk] | None = None
    """the size that the layers' inputs are at hand for, and these; of a CPU only"""

    def advance(self, label: str, weight: float) -> None:
        self.done += weight
        if time.monotonic() - self.saved > _SAVE_EVERY:
            self.save()
        self.report(label, min(1.0, self.done / self.total))
        if self.settings.deadline is not None and time.monotonic() > self.settings.deadline:
            raise KeyboardInterrupt

    def save(self) -> None:
        save_measurement(self.measured, self.settings.folder)
        self.saved = time.monotonic()

    def drop(self, size: int) -> None:
        """Note that a size does not fit."""
        self.measured = replace(
            self.measured,
            not_fitting=tuple(sorted({*self.measured.not_fitting, size})),
            timings=tuple(item for item in self.measured.timings if item.microbatch != size),
            memory=tuple(item for item in self.measured.memory if item.microbatch != size),
            parts=tuple(item for item in self.measured.parts if item.microbatch != size),
        )

    def piece(self, chain: LayerSequence, first: int, last: int) -> RunnableLayer:
        if (first, last) not in self.pieces:
            self.pieces[first, last] = chain.piece(first, last)
        return self.pieces[first, last]

    def layers_of(self, chain: LayerSequence) -> list[RunnableLayer]:
        return [self.piece(chain, index, index) for index in range(len(chain.layers))]

    def walk(self, chain: LayerSequence, size: int) -> Walk:
        """What every layer receives at that size; on a CPU the last one's is kept, it takes a forward to make."""
        if self.walked is not None and self.walked[0] == size:
            return self.walked[1]
        self.walked = None
        values = walk(chain, self.layers_of(chain), size)
        if chain.device.type == "cpu":
            self.walked = (size, values)
        return values


def warmup_of(chain: LayerSequence) -> int:
    return 3 if chain.device.type == "cuda" else 1


def layer_failure(model: str, size: int, error: Exception) -> BaPipeError:
    """What a layer raised, as a mistake that names the size."""
    if isinstance(error, BaPipeError):
        return error
    return BaPipeError(
        f"{model} fails with a micro-batch of {size}: {type(error).__name__}: {first_line(error)}; "
        "profile other sizes or correct it"
    )


def dtype_of(chain: LayerSequence) -> torch.dtype:
    return next((item.dtype for item in chain.module.parameters() if item.is_floating_point()), torch.float32)


def free_memory(chain: LayerSequence) -> None:
    if chain.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()

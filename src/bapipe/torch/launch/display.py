"""What a run shows while it trains: a line per step, one that is rewritten on a terminal, or a JSON object."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from bapipe.records.plan import Plan
from bapipe.records.run_record import StepRecord
from bapipe.torch.launch.step_loggers import StepLogger
from bapipe.units import format_seconds

__all__ = ["Display"]

_LINES = 20
"""lines that stay on a terminal; what lies between is rewritten"""


class Display:
    """Rank 0's: every step's loss, time, samples/s, bubble and time beside the plan's prediction."""

    def __init__(
        self,
        plan: Plan,
        steps: int,
        *,
        as_json: bool = False,
        loggers: Sequence[StepLogger] = (),
        stream: TextIO | None = None,
    ) -> None:
        self._global_batch = plan.global_batch
        self._predicted = plan.prediction.time
        self._steps = steps
        self._json = as_json
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty() and not as_json
        self._every = max(1, math.ceil(steps / _LINES)) if self._terminal else 1
        self._open = False
        """whether the cursor stands in a line that will be rewritten"""
        self._loggers = tuple(loggers)

    def progress(self, text: str) -> None:
        """What goes on before the first step: on a terminal, a line that the next one replaces."""
        if self._terminal:
            self._write(f"\r\x1b[2K{text} …")
            self._open = True

    def step(self, record: StepRecord, bubble: float | None) -> None:
        """One more step is done; its bubble is None where nothing is traced."""
        figures: dict[str, float | int | None] = {
            "step": record.step,
            "loss": record.loss if record.loss is not None and math.isfinite(record.loss) else None,
            "seconds": record.seconds,
            "samples_per_second": self._global_batch / record.seconds,
            "bubble": bubble,
            "measured_over_predicted": record.seconds / self._predicted,
        }
        for logger in self._loggers:
            logger.step(figures)
        if self._json:
            self._write(json.dumps(figures, allow_nan=False) + "\n")
            return
        line = (
            f"step {record.step}  loss {math.nan if record.loss is None else record.loss:.6f}  "
            f"{format_seconds(record.seconds)}  {self._global_batch / record.seconds:.1f} samples/s  "
            f"{'' if bubble is None else f'bubble {bubble:.1%}  '}"
            f"{record.seconds / self._predicted:.2f}x predicted"
        )
        if not self._terminal:
            self._write(f"{line}\n")
            return
        stays = record.step % self._every == 0 or record.step == self._steps - 1
        self._write(f"\r\x1b[2K{line}" + ("\n" if stays else f"  [{record.step + 1}/{self._steps}]"))
        self._open = not stays

    def say(self, text: str, **figures: Any) -> None:
        """A line, or as JSON the figures that it is made of."""
        if self._json:
            self._write(json.dumps(figures, allow_nan=False) + "\n")
        else:
            self._write(("\n" if self._open else "") + f"{text}\n")
        self._open = False

    def close(self) -> None:
        """The run is over; what loggers took is where it is to be."""
        for logger in self._loggers:
            logger.close()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

"""What runs the stages of one rank: made from the captured model for each length of sequences."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Schedule
from bapipe.torch.capturing import Captured
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.runtime.build_stages import OwnStages, own_stages
from bapipe.torch.stage.compiled_loss import CompiledWeighing
from bapipe.torch.stage.loss import LossFunction, LossSum
from bapipe.torch.stage.loss_weighing import Weighing
from bapipe.torch.stage.runner import StageRunner

__all__ = ["StageMaker"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMaker:
    """Makes the stages of a rank, the weighing of their loss, and their runners."""

    plan: Plan
    schedule: Schedule
    rank: int
    sizes: tuple[int, ...]
    """samples of each micro-batch"""
    device: torch.device
    engine: str
    """what runs the stages: bapipe or torch"""
    mixed: MixedForward | None
    """autocast of mixed precision"""
    programs: CompiledPrograms | None
    """compiled layers; None: they run as they were captured"""

    def captures(self, captured: Captured, lengths: Sequence[int]) -> dict[int | None, Captured]:
        """The model for sequences as in the example (None), and captured for every other length."""
        others = sorted(set(lengths) - {captured.examples.length})
        if others and not self.schedule.flushes:
            raise BaPipeError(f"{self.schedule.name} runs sequences of one length; leave lengths out")
        if others and self.engine == "torch":
            raise BaPipeError(
                "torch's engine runs sequences of one length; leave lengths out, or use engine='bapipe'"
            )
        return {None: captured, **{length: captured.of_length(length) for length in others}}

    def forms(self, captures: Mapping[int | None, Captured]) -> dict[int | None, OwnStages]:
        """The stages for each length of sequences; they share weights."""
        store: dict[tuple[str, int, int], Tensor] = {}
        with self._casting():  # compiled layers have the casts in them
            own = {
                length: own_stages(
                    one,
                    self.plan,
                    self.schedule,
                    rank=self.rank,
                    sizes=self.sizes,
                    device=self.device,
                    programs=self.programs,
                    store=store,
                )
                for length, one in captures.items()
            }
        if self.programs is not None and not self.programs.compiled:
            reason = next(iter(self.programs.failed.values()), "it has none")
            _logger.warning("rank %d compiles no layer and runs all as captured: %s", self.rank, reason)
        return own

    def weighing(self, loss_fn: LossFunction | None, own: OwnStages, *, warns: bool) -> Weighing:
        """Of each micro-batch's loss in that of the global batch."""
        if self.programs is None:
            return Weighing(loss_fn, own.loss, warns=warns)
        return CompiledWeighing(loss_fn, own.loss, warns=warns, programs=self.programs)

    def runners(self, own: OwnStages, loss: LossSum) -> dict[int, StageRunner]:
        """By stage; the last one adds to `loss`."""
        last = self.schedule.num_stages - 1
        # torch's engine splits a backward itself.
        split = self.schedule.parted_stages() if self.engine == "bapipe" else frozenset()
        return {
            index: StageRunner(
                index,
                modules,
                sizes=self.sizes,
                evaluation=own.evaluation[index],
                device=self.device,
                recompute=self.plan.stages[index].recompute,
                split=index in split,
                loss=loss if index == last else None,
                output=own.output if index == last else None,
                mixed=self.mixed,
            )
            for index, modules in own.stages.items()
        }

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mixed is None else self.mixed.forward()

"""The options of a Pipeline beside model, plan and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bapipe.schedule.actions import Action
from bapipe.torch.health.divergence import Diverging
from bapipe.torch.health.stragglers import Straggler
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.nonfinite import NonFinite

__all__ = ["PipelineOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a rank trains."""

    device: torch.device | str | None = None
    """None: as planned"""
    engine: str = "bapipe"
    """what runs the stages: `bapipe`, or `torch` for torch.distributed.pipelining's runtime"""
    transport: str = "auto"
    """how tensors get to other ranks"""
    precision: str | None = None
    """fp32, tf32, bf16, fp16, bf16-mixed or fp16-mixed; None: the plan's"""
    autocast: torch.dtype | None = None
    """runs forwards and the loss under torch.autocast to this dtype; None: as the precision has it"""
    compile: bool | None = None
    """whether layers run compiled, see `bapipe.torch.compiling`; None: as the plan says"""
    lengths: tuple[int, ...] = ()
    """positions that sequences of a batch may have, beside those of the example; see `InputSpec.length`"""
    seed: int | None = 0
    """makes every rank build the same weights; None leaves torch's generator alone"""
    timeout: float = 300.0
    """seconds that a silent rank is waited for"""
    on_action: Callable[[Action], None] | None = None
    """called before every action"""
    trace: bool = True
    """whether start and end of every action are recorded, in `Pipeline.trace`; without, none is timed"""
    on_nonfinite: Callable[[NonFinite], None] | None = None
    """called on every rank, once, when the loss or a norm of gradients is not finite; None: rank 0 logs a line.
    A PipeDream calls it on the rank of the last stage"""
    on_divergence: Callable[[Diverging], None] | None = None
    """called on every rank, after a step, where gradients have become much larger than they were; None: rank 0
    logs a warning. Not by `PipeDream`"""
    on_straggler: Callable[[Straggler], None] | None = None
    """called on every rank, after a step, with a rank that has become slow; None: rank 0 logs a warning. Only
    where actions are recorded, and not by `PipeDream`"""
    watch: Watch | None = None
    """replaces the watchdog that is made otherwise, which logs why a run fails"""

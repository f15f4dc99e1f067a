"""What `bapipe auto` is to do, with the defaults that its command shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bapipe.costs.optimizers import parse_optimizer
from bapipe.costs.profile_ways import Compiling
from bapipe.hardware.precision import DEFAULT_PRECISION, find_precision
from bapipe.models.builtin import Argument

__all__ = ["AutoOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """What `auto` is to do."""

    folder: Path = Path("bapipe-auto")
    """where everything is written"""
    args: Mapping[str, Argument] = field(default_factory=dict)
    """arguments of the model's function"""
    global_batch: int | None = None
    """samples of one optimizer step; None: 64 per GPU, 16 per CPU rank"""
    micro_batches: tuple[int, ...] = ()
    """sizes that a plan may take; (): up to four powers of two"""
    ranks: int | None = None
    """None: all GPUs, or all cores"""
    optimizer: str = "adam"
    precision: str = DEFAULT_PRECISION
    """fp32, tf32, bf16, fp16, bf16-mixed or fp16-mixed"""
    dtype: str | None = None
    """older name of `precision`"""
    device: str | None = None
    """cpu or cuda; None: what there is"""
    compiled: Compiling = False
    """whether layers are measured and run compiled; auto: they are measured both ways and run as is faster"""
    racing: int = 4
    """plans that are raced; 1: none is, the prediction decides"""
    fresh: bool = False
    """measure again what the folder has"""
    timeout: float = 300.0
    """seconds before a silent rank is given up"""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "precision", self.dtype)
        parse_optimizer(self.optimizer).require_for(find_precision(self.precision))

"""The options of a run, from `bapipe run` through the launcher to every rank. Imports no torch.

A new option is one field here and one click option of the same name in `bapipe.cli.run`: ranks get all fields that
do not have their default as one JSON argument.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from bapipe.errors import BaPipeError
from bapipe.io.decode import decode
from bapipe.torch.checkpoint.checkpoint_options import Saving

__all__ = ["LONGEST_TIMEOUT", "RunOptions", "parse_options"]

LONGEST_TIMEOUT = 1e7
"""seconds, 115 days; gloo and the store count in milliseconds of 64 bits"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a plan; `check_run` and the ranks refuse what cannot be run of it."""

    steps: int = 3
    """global batches to train"""
    check: bool = False
    """whether to compare every gradient with training in one process"""
    out: Path | None = None
    """where to write run.json; None: nowhere"""
    seed: int = 0
    """of weights and data: global batch s is made with seed + 1 + s"""
    learning_rate: float = 0.01
    """the optimizer's"""
    timeout: float = 300.0
    """seconds before a silent rank is given up"""
    data: str = "synthetic"
    """synthetic: the model's own make_batch; digits: scikit-learn's"""
    engine: str = "bapipe"
    """what runs the stages: bapipe, or torch for torch.distributed.pipelining's runtime"""
    transport: str = "auto"
    """how tensors get from rank to rank"""
    device: str | None = None
    """cpu or cuda; None: what the plan has for each rank"""
    compiled: bool | None = None
    """whether layers run compiled; None: as the plan says"""
    trace: bool = True
    """whether start and end of every action are recorded, for run.json's timeline and a step's bubble"""
    vertical_sync: bool = False
    """of a PipeDream plan: whether all stages use the version of the weights that stage 0 has"""
    as_json: bool = False
    """whether to print a JSON object per step"""
    tensorboard: Path | None = None
    """folder to write every step's figures into for TensorBoard; None: they are not written"""
    log: tuple[str, ...] = ()
    """where else every step's figures go: csv:FILE, tensorboard:FOLDER, wandb:PROJECT, package.module:function"""
    saving: Saving | None = None
    """None: the run is not saved"""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BaPipeError(f"a run needs at least 1 step, got {self.steps}; raise --steps")
        if not self.timeout > 0:
            raise BaPipeError(f"the timeout must be more than 0 s, got {self.timeout:g}; raise --timeout")
        if self.timeout > LONGEST_TIMEOUT:
            raise BaPipeError(
                f"the timeout can be {LONGEST_TIMEOUT:g} s at most, got {self.timeout:g}; lower --timeout"
            )
        if not 0 <= self.learning_rate < math.inf:
            raise BaPipeError(
                f"the learning rate must be at least 0, got {self.learning_rate:g}; change --learning-rate"
            )
        for name, number in (("steps", self.steps), ("seed", self.seed)):
            if not -(2**62) < number < 2**62:
                raise BaPipeError(f"the {name} must be within 62 bits, got {number}; lower --{name}")

    def to_json(self) -> str:
        """One line for a command line, without the fields that have their default; `parse_options` reads it."""
        return json.dumps(_changed(self), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _changed(value: Any) -> Any:
    """A dataclass as a table of the fields that do not have their default."""
    if isinstance(value, Path):
        return str(value)
    if not is_dataclass(value):
        return value
    given = ((field, getattr(value, field.name)) for field in fields(value))
    return {
        field.name: _changed(item) for field, item in given if field.default is MISSING or item != field.default
    }


def parse_options(text: str) -> RunOptions:
    """What `RunOptions.to_json` wrote; BaPipeError for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise BaPipeError(
            f"the options of a run are JSON, got {text[:60]!r}; give what bapipe launch --print writes"
        ) from None
    return decode(RunOptions, data, where="the options of the run")

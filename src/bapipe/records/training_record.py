"""TrainingRecord: what a checkpoint says of the training that it is of; versioned as training.json.

It lies among the files of a checkpoint, so the checkpoint's manifest has its SHA-256. A run that goes on from the
checkpoint compares it with its own. Nothing in it depends on the plan: on stages, ranks or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bapipe.io.files import dump_json, parse_versioned, read_text

__all__ = [
    "TRAINING_SCHEMA",
    "ConstantTensor",
    "ModuleOperations",
    "OptimizerRecord",
    "Setting",
    "Structure",
    "TrainingRecord",
    "dump_training",
    "parse_training",
    "read_training",
]

TRAINING_SCHEMA = "bapipe.training/1"
Setting = str | int | float | bool | None
"""a value that training goes by"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOperations:
    """What one module of the model computes, in order."""

    path: str
    """of the module; empty: the model itself"""
    operations: tuple[str, ...]
    """each with its constant arguments, such as `aten.gelu(approximate='tanh')`; tensors are left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTensor:
    """A tensor that the model computes with and that is in no checkpoint: a constant, or an unsaved buffer.

    Sums and not a hash: another machine may compute the same values with other last bits.
    """

    shape: tuple[int, ...]
    dtype: str
    sums: tuple[float, ...]
    """of its absolute values, of its values, and of its values weighed by their places; empty: it has no memory"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a model computes, whatever the values of its parameters are."""

    sha256: str
    """of all operations, their constant arguments, and which results and parameters each takes"""
    modules: tuple[ModuleOperations, ...]
    """in the order of their first operations"""
    constants: dict[str, ConstantTensor] = field(default_factory=dict)
    """by name; the constants of the code are numbered"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """What changes the parameters."""

    name: str
    """of the class, such as `torch.optim.adamw.AdamW`; several are separated by commas"""
    options: dict[str, tuple[str, ...]]
    """option -> its value when training began; where parameter groups differ, all that there are"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """What a training is, beside the values of its tensors."""

    schema: str = TRAINING_SCHEMA
    structure: Structure
    precision: str
    """by its word, such as `bf16-mixed`"""
    optimizer: OptimizerRecord | None
    """None: it was saved without one"""
    settings: dict[str, Setting] = field(default_factory=dict)
    """what else the training goes by, such as its seed"""


def dump_training(record: TrainingRecord) -> str:
    """The text of training.json."""
    return dump_json(record)


def parse_training(text: str, *, where: str) -> TrainingRecord:
    """What `dump_training` wrote; FileFormatError for anything else, a newer schema included."""
    return parse_versioned(TrainingRecord, text, schema=TRAINING_SCHEMA, where=where)


def read_training(path: str | Path) -> TrainingRecord:
    """As `parse_training`, of a file."""
    return parse_training(read_text(path), where=str(path))

"""Where the figures of every step go beside the terminal: CSV, TensorBoard, Weights & Biases, a function.

A logger is anything with `step(figures)` and `close()`. Imports no torch unless TensorBoard is wanted.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from bapipe.errors import BaPipeError
from bapipe.io.files import check_output

__all__ = ["CsvLogger", "Figures", "StepLogger", "check_logger", "make_logger"]

Figures = Mapping[str, float | int | None]
"""step, loss, seconds, samples_per_second, bubble, measured_over_predicted; None: not known"""


class StepLogger(Protocol):
    """Takes what is known of every step, on rank 0."""

    def step(self, figures: Figures) -> None:
        """One more step is done."""

    def close(self) -> None:
        """The run is over."""


class CsvLogger:
    """A line of a CSV file for every step, on disk as soon as it is done; a file that is there is continued."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file: TextIO = Path(path).open("a", newline="", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise BaPipeError(f"{path} cannot be written: {error.strerror}; give another file") from error
        self._writer = csv.writer(self._file)
        self._begun = self._file.tell() > 0

    def step(self, figures: Figures) -> None:
        """Write the line; before the first of a file the names of its columns."""
        if not self._begun:
            self._writer.writerow(figures)
            self._begun = True
        self._writer.writerow("" if value is None else value for value in figures.values())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _TensorBoardLogger:
    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BaPipeError(
                f"--tensorboard needs tensorboard, which cannot be loaded ({error}); pip install tensorboard"
            ) from error
        self._writer: Any = SummaryWriter(log_dir=folder)

    def step(self, figures: Figures) -> None:
        for name, value in figures.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"bapipe/{name}", value, figures["step"])

    def close(self) -> None:
        self._writer.close()


class _WandbLogger:
    """Offline unless WANDB_MODE says otherwise: `wandb sync` uploads what it wrote."""

    def __init__(self, project: str) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project or "bapipe", mode=os.environ.get("WANDB_MODE", "offline"))

    def step(self, figures: Figures) -> None:
        known = {
            f"bapipe/{name}": value for name, value in figures.items() if name != "step" and value is not None
        }
        self._run.log(known, step=figures["step"])

    def close(self) -> None:
        self._run.finish()


class _FunctionLogger:
    def __init__(self, function: Callable[[Figures], object]) -> None:
        self._function = function

    def step(self, figures: Figures) -> None:
        self._function(figures)

    def close(self) -> None:
        """Nothing to close."""


_KINDS: dict[str, Callable[[str], StepLogger]] = {
    "csv": CsvLogger,
    "tensorboard": _TensorBoardLogger,
    "wandb": _WandbLogger,
}
_PACKAGES = ("tensorboard", "wandb")


def check_logger(word: str) -> None:
    """Refuse, before anything runs, a logger that is not known or not installed."""
    kind, colon, rest = word.partition(":")
    if not colon or not (rest or kind == "wandb"):
        raise BaPipeError(
            f"--log takes csv:FILE, tensorboard:FOLDER, wandb:PROJECT or package.module:function, got "
            f"'{word[:60]}'; correct it"
        )
    if kind in _PACKAGES and importlib.util.find_spec(kind) is None:
        raise BaPipeError(f"--log {kind} needs {kind}, which is not installed; pip install {kind}")
    check_output(rest if kind == "csv" else None)


def make_logger(word: str) -> StepLogger:
    """The logger that a word of `--log` stands for; a function is looked for as a model's is."""
    kind, _, rest = word.partition(":")
    if kind in _KINDS:
        return _KINDS[kind](rest)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(kind), rest)
    except (ImportError, AttributeError) as error:
        raise BaPipeError(f"--log {word[:60]} cannot be imported: {error}; put it on PYTHONPATH") from error
    if not callable(function):
        raise BaPipeError(f"--log {word[:60]} is no function; give one that takes the figures of a step")
    return _FunctionLogger(function)

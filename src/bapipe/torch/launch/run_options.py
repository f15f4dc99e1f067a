"""The options of a run, from `bapipe run` through the launcher to every rank. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # `bapipe --help` imports the options of every command, and Saving brings the file formats with it.
    from bapipe.torch.checkpoint.checkpoint_options import Saving

__all__ = ["RunOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a plan. Nothing is checked here: `check_run` and the ranks refuse what cannot be run."""

    steps: int = 3
    """mini-batches to train"""
    check: bool = False
    """whether to compare every gradient with training in one process"""
    out: str | Path | None = None
    """where to write run.json; None: nowhere"""
    seed: int = 0
    """of weights and data"""
    learning_rate: float = 0.01
    """the optimizer's"""
    timeout: float = 300.0
    """seconds before a silent rank is given up"""
    data: str = "synthetic"
    """synthetic: the model's own make_batch; digits: scikit-learn's"""
    transport: str = "auto"
    """how tensors get from rank to rank"""
    device: str | None = None
    """cpu or cuda; None: what the plan has for each rank"""
    vertical_sync: bool = False
    """of a PipeDream plan: whether all stages use the version of the weights that stage 0 has"""
    as_json: bool = False
    """whether to print a JSON object per step"""
    tensorboard: str | Path | None = None
    """folder to write every step's figures into for TensorBoard; None: they are not written"""
    saving: Saving | None = None
    """None: the run is not saved"""

    def arguments(self) -> list[str]:
        """For a rank, after its plan: `bapipe.torch.launch.worker` reads them."""
        arguments = ["--steps", str(self.steps), "--seed", str(self.seed)]
        arguments += ["--learning-rate", str(self.learning_rate), "--timeout", f"{self.timeout:g}"]
        arguments += ["--data", self.data, "--transport", self.transport]
        flags = {"check": self.check, "vertical-sync": self.vertical_sync, "json": self.as_json}
        arguments += [f"--{name}" for name, wanted in flags.items() if wanted]
        for name, value in (("device", self.device), ("out", self.out), ("tensorboard", self.tensorboard)):
            arguments += [] if value is None else [f"--{name}", str(value)]
        return arguments + ([] if self.saving is None else self.saving.arguments())

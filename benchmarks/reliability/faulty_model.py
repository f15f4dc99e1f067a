"""A small model whose ranks fail where they are asked to: in F, B, the loss, the optimizer step, a save, a load.

The fault is a JSON file that BAPIPE_FAULT names (`fault_cases.Fault`); without it the model is an ordinary one. A
fault happens once: a file says that it has, so that a run that is started again is spared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

FEATURES, CLASSES, LAYERS = 8, 4, 6
RANK = int(os.environ.get("RANK", "0"))


class BrokenLayerError(Exception):
    """What a fault raises."""


class Trigger:
    """Waits for the moment at which this rank is to fail."""

    def __init__(self, path: str | None) -> None:
        self.fault: dict[str, Any] = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
        self.folder = Path(path).parent if path is not None else Path()
        self.step = -1
        """of the batch that was made last"""

    def reached(self, place: str) -> None:
        """This rank is at such a place; it fails there if it is to."""
        fault = self.fault
        if fault.get("place") != place or RANK not in fault["ranks"]:
            return
        if place not in ("build", "resume") and self.step < fault["step"]:
            return
        if not self._is_first():
            return
        for rank in fault["ranks"]:  # at once, wherever they are
            if rank != RANK:
                number = signal.SIGSTOP if fault["how"] == "stop" else signal.SIGKILL
                os.kill(int((self.folder / f"process-{rank}").read_text(encoding="ascii")), number)
        self._happen(fault["how"])

    def _is_first(self) -> bool:
        """Whether it has not happened yet."""
        try:
            handle = os.open(self.folder / "fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(handle, repr(time.time()).encode())
        os.close(handle)
        return True

    def _happen(self, how: str) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "slow":
            time.sleep(self.fault["seconds"])
        elif how == "raise" and self.fault["place"] == "save":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif how == "raise":
            raise BrokenLayerError("this rank was asked to fail")
        elif how in ("kill launcher", "terminate launcher"):
            launcher = int((self.folder / "launcher").read_text(encoding="ascii"))
            os.kill(launcher, signal.SIGKILL if how.startswith("kill") else signal.SIGTERM)
        elif how == "fill disk":
            with contextlib.suppress(OSError), (Path(self.fault["disk"]) / "ballast").open("wb", 0) as ballast:
                while True:
                    ballast.write(bytes(4096))
        elif how == "read-only disk":
            # A second mount over the first: what is open stays so, and a lock file always is.
            subprocess.run(["mount", "--bind", self.fault["disk"], self.fault["disk"]], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", self.fault["disk"]], check=True)
        else:
            raise ValueError(f"no fault is called {how}")


trigger = Trigger(os.environ.get("BAPIPE_FAULT"))


class Reached(torch.autograd.Function):
    """The identity, whose backward passes through a fault's place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        trigger.reached("B")
        return gradients[0]


class WatchedLayer(nn.Module):
    """A linear layer. It looks at its values, which no trace can follow, so that its own code runs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs, dtype=torch.float64)

    def forward(self, value: Tensor) -> Tensor:
        if float(value.detach().sum()) == float("inf"):
            return value
        trigger.reached("F")
        return Reached.apply(torch.tanh(self.inner(value)))  # type: ignore[no-any-return,no-untyped-call]


def build() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and an example of its input."""
    trigger.reached("build")
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(LAYERS - 1):
        blocks[f"layer{index}"] = WatchedLayer(FEATURES, FEATURES)
    blocks["head"] = WatchedLayer(FEATURES, CLASSES)
    return nn.Sequential(blocks), (torch.zeros(1, FEATURES, dtype=torch.float64),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes of one global batch; a run with seed 0 makes that of step s with seed s + 1."""
    trigger.step = seed - 1
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return data, torch.randint(CLASSES, (size,), generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over the samples."""
    trigger.reached("loss")
    return nn.functional.cross_entropy(output, target)


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    """Python tells of every file that is opened: those of a checkpoint are where a save and a load are at."""
    if event != "open" or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    path = os.fsdecode(arguments[0])
    if "/.partial-" in path:
        trigger.reached("save")
    elif "/step-0000" in path:
        trigger.reached("resume")


if trigger.fault:
    (trigger.folder / f"process-{RANK}").write_text(str(os.getpid()), encoding="ascii")
    sys.addaudithook(_opened)
    register_optimizer_step_pre_hook(lambda *_: trigger.reached("optimizer"))

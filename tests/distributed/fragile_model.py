"""A model whose second layer does what the test asks in a given forward: it is killed, raises or never returns.

`place` asks the same of other code: the backward of that layer, the loss, a look-up with an index out of range, or
the function that builds the model, on rank 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, WORDS = 4, 5
asked: dict[str, Any] = {}
"""what the model was built with, and how many times are left"""


class Leaving(BaseException):
    """What `except Exception` does not catch."""


LEAVING = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "leave": Leaving}


def fail(how: str, note: str) -> None:
    Path(note).write_text(str(time.time()), encoding="ascii")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(600)
    if how in LEAVING:
        raise LEAVING[how]("the layer leaves")
    raise ValueError("the layer broke\nas the test asked")


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: str, note: str) -> Tensor:
        ctx.asked = how, note
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *errors: Any) -> Any:  # noqa: ARG004
        fail(*ctx.asked)


class Fragile(nn.Module):
    """Looks at its values, which no trace can follow, so that it is kept whole and its own code runs."""

    def __init__(self, how: str, place: str, note: str) -> None:
        super().__init__()
        self.how, self.place, self.note = how, place, note
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, value: Tensor) -> Tensor:
        made = self.inner(value)
        if float(value.detach().sum()) == float("inf"):
            return value
        if self.how != "steady" and self.place in ("forward", "backward"):
            asked["left"] -= 1
            if asked["left"] < 0 and self.place == "forward":
                fail(self.how, self.note)
            if asked["left"] < 0:
                made = Breaking.apply(made, self.how, self.note)
        return made


class LookUp(nn.Module):
    """Traced: what it raises comes from an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.words(value.sum(1).long())


def build(
    *, how: str, at: int = 30, note: str = "", place: str = "forward"
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    asked.update(how=how, left=at, note=note, place=place)
    if place == "build" and os.environ.get("RANK") == "1":
        fail(how, note)
    second = LookUp() if place == "look-up" else Fragile(how, place, note)
    first = nn.Linear(FEATURES, FEATURES)
    if place == "look-up":
        # Ordinary inputs look up word 0, inputs of a thousand one that there is not.
        nn.init.constant_(first.weight, 0.001)
        nn.init.zeros_(first.bias)
    layers = OrderedDict(first=first, second=second, third=nn.Linear(FEATURES, 2))
    return nn.Sequential(layers).double(), (torch.zeros(1, FEATURES, dtype=torch.float64),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((size, FEATURES), (size, 2))
    data, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return data, target


def loss(output: Tensor, target: Tensor) -> Tensor:
    if asked["place"] == "loss":
        asked["left"] -= 1
        if asked["left"] < 0:
            fail(asked["how"], asked["note"])
    return nn.functional.mse_loss(output, target)

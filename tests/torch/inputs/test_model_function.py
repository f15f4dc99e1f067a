"""What a model's function and `make_batch` may return, and what `bapipe run` trains it with."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch's: pip install bapipe[torch]")

from torch import Tensor, nn  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.models.layers import ModelRef  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.inputs.build_model import BuiltModel, build_model  # noqa: E402
from bapipe.torch.inputs.training_data import batches_for  # noqa: E402
from bapipe.torch.runtime.microbatches import InputSpec, split_inputs  # noqa: E402

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, x, labels=None, *, scale=1.0, verbose=False, mode=None):
        logits = self.body(x) * scale
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

@dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor

def alone(): return Classifier()
def with_args(): return Classifier(), (torch.rand(2, 3),)
def with_kwargs(): return Classifier(), {"x": torch.rand(2, 3), "labels": torch.tensor([0, 3])}
def full():
    kwargs = {"labels": torch.tensor([0, 3]), "scale": 2.0, "verbose": False, "mode": None}
    return Classifier(), (torch.rand(2, 3),), kwargs
"""
BATCH = """
def make_batch(seed, size):
    generator = torch.Generator().manual_seed(seed)
    return {result}
"""
PAIR = "torch.rand(size, 3, generator=generator), torch.randint(4, (size,), generator=generator)"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes a module of that source and builds one of its functions."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def build(function: str, extra: str = "") -> BuiltModel:
        (tmp_path / "a_model.py").write_text(SOURCE + extra)
        sys.modules.pop("a_model", None)
        return build_model(ModelRef(name=function, ref=f"a_model:{function}"), folders=(tmp_path,))

    yield build
    sys.modules.pop("a_model", None)


@pytest.mark.parametrize(
    ("function", "args", "keywords"),
    [
        ("with_args", 1, set()),
        ("with_kwargs", 0, {"x", "labels"}),
        ("full", 1, {"labels", "scale", "verbose", "mode"}),
    ],
)
def test_a_function_may_leave_out_kwargs(write: Any, function: str, args: int, keywords: set[str]) -> None:
    built = write(function)
    assert (len(built.args), set(built.kwargs)) == (args, keywords)
    built.module(*built.args, **built.kwargs)


def test_a_module_alone_takes_its_example_from_make_batch(write: Any) -> None:
    made = "Batch(torch.rand(size, 3, generator=generator), torch.randint(4, (size,), generator=generator))"
    built = write("alone", BATCH.format(result=made))
    assert set(built.kwargs) == {"x", "labels"}
    with pytest.raises(BaPipeError, match=r"without an example of its inputs; return \(module, args\)"):
        write("alone")


@pytest.mark.parametrize(
    "result", ["1", "(nn.Linear(1, 1), torch.rand(2))", "(1, ())", "(nn.Linear(1, 1), (), {}, 0)"]
)
def test_other_returns_are_refused_with_what_is_wanted(write: Any, result: str) -> None:
    with pytest.raises(BaPipeError, match=r"must return a module, \(module, args\) or \(module, args, kwargs\)"):
        write("other", f"\ndef other(): return {result}\n")


@pytest.mark.parametrize(
    "made",
    [
        "dict(x=torch.rand(size, 3), labels=torch.randint(4, (size,)))",
        "Batch(torch.rand(size, 3), torch.randint(4, (size,)))",
        "__import__('collections').UserDict(x=torch.rand(size, 3), labels=torch.randint(4, (size,)))",
        "(torch.rand(size, 3), dict(labels=torch.randint(4, (size,))))",
    ],
)
def test_a_model_that_returns_its_loss_trains_as_it_is(write: Any, made: str) -> None:
    """Batches are dicts, dataclasses, other mappings or tuples; constants of the captured call are not in them."""
    example = "with_kwargs" if made[0] != "(" else "full"
    built = write(example, BATCH.format(result=made))
    assert built.loss is None
    inputs, target = batches_for(built, "synthetic", global_batch=6, seed=0)(0)
    assert target is None
    spec = InputSpec.of(capture(built.module, built.args, built.kwargs))
    parts = split_inputs(spec, inputs, (3, 3), needed=set(range(len(spec.batched))))
    output = built.module(*(call := spec.call(parts[1])).args, **call.kwargs)
    assert output["logits"].shape == (3, 4)
    assert call.kwargs.get("scale", 2.0) == 2.0


def test_without_make_batch_samples_of_the_example_are_drawn(write: Any) -> None:
    built = write("full")
    make = batches_for(built, "synthetic", global_batch=16, seed=0)
    (x, kwargs), target = make(0)
    assert target is None
    rows = {tuple(row.tolist()) for row in built.args[0]}
    assert {tuple(row.tolist()) for row in x} == rows
    assert (kwargs["labels"] == torch.where((x == built.args[0][0]).all(1), 0, 3)).all()  # labels stay with inputs
    assert not torch.equal(make(1)[0][0], x)
    assert torch.equal(make(0)[0][0], x)


def test_a_loss_function_needs_targets(write: Any) -> None:
    loss = "\ndef loss(output, target): return (output - target).mean()\n"
    with pytest.raises(BaPipeError, match=r"add make_batch\(seed, size\) -> \(inputs, target\)"):
        batches_for(write("with_args", loss), "synthetic", global_batch=4, seed=0)
    built = write("with_args", loss + BATCH.format(result=PAIR))
    inputs, target = batches_for(built, "synthetic", global_batch=4, seed=0)(0)
    assert inputs.shape == (4, 3)
    assert target.shape == (4,)
    make = batches_for(
        write("with_args", loss + BATCH.format(result="torch.rand(size, 3)")), "synthetic", global_batch=4, seed=0
    )
    with pytest.raises(BaPipeError, match=r"must return \(inputs, target\), as there is a loss function"):
        make(0)


def test_a_batch_of_another_size_is_refused(write: Any) -> None:
    built = write("with_kwargs", BATCH.format(result="dict(x=torch.rand(3, 3), labels=torch.randint(4, (3,)))"))
    with pytest.raises(BaPipeError, match=r"make_batch was asked for 4 samples, got shape \(3, 3\)"):
        batches_for(built, "synthetic", global_batch=4, seed=0)(0)


class Scaled(nn.Module):
    """Takes constants beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, scale: float = 1.0, flag: bool = False) -> Tensor:
        return x * self.weight * scale if not flag else x


@dataclass
class Inputs:
    x: Tensor


class Wrapped(Scaled):
    """Takes a dataclass."""

    def forward(self, batch: Inputs) -> Tensor:  # type: ignore[override]
        return batch.x * self.weight


def test_constants_of_the_capture_need_not_be_given_and_must_not_differ() -> None:
    spec = InputSpec.of(capture(Scaled(), (torch.rand(2, 3), 3.0), {"flag": False}))
    x = torch.rand(4, 3)
    for given in (x, (x,), (x, 3.0), (x, {"flag": False}), (x, 3.0, UserDict(flag=False))):
        leaves = spec.leaves(given)
        assert [type(leaf) for leaf in leaves] == [Tensor, float, bool]
        assert split_inputs(spec, given, (2, 2), needed={0, 1, 2})[1][1:] == [3.0, False]
    with pytest.raises(BaPipeError, match=r"input 1 is 2\.0, the model was captured with 3\.0, which"):
        split_inputs(spec, (x, 2.0), (2, 2), needed={0})
    with pytest.raises(BaPipeError, match="input 2 is True, the model was captured with False"):
        split_inputs(spec, (x, {"flag": True}), (2, 2), needed={0})
    with pytest.raises(BaPipeError, match="keyword arguments flag, got other"):
        spec.leaves((x, {"other": 1}))


def test_a_model_without_keywords_takes_a_dataclass_as_an_argument() -> None:
    spec = InputSpec.of(capture(Wrapped(), (Inputs(torch.rand(2, 3)),)))
    assert spec.leaves(Inputs(torch.zeros(4, 3)))[0].shape == (4, 3)

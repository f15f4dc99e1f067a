"""Nothing private of torch outside one file, and what that file needs is where it was."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import bapipe.torch.capturing
from bapipe.torch.capturing import capture, export, torch_internals
from bapipe.torch.zoo.gnmt import build_gnmt
from private_names import private_names

FOLDER = Path(bapipe.torch.capturing.__file__).parent
ZOO = FOLDER.parent / "zoo"


@pytest.mark.parametrize("file", sorted([*FOLDER.glob("*.py"), *ZOO.glob("*.py")]), ids=lambda file: file.name)
def test_private_names_are_in_one_file(file: Path) -> None:
    if file.name == "torch_internals.py":
        assert private_names(file)
    else:
        assert private_names(file) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.block(value).relu_() * self.scale}


def test_what_is_read_of_an_exported_program() -> None:
    value = torch.randn(3, 4)
    program = torch.export.export(Tied(), (value,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    kinds = [(item.kind, item.target) for item in torch_internals.placeholders(program)]
    assert kinds == [
        ("parameter", "block.0.weight"),
        ("parameter", "block.0.bias"),
        ("buffer", "scale"),
        ("input", None),
    ]
    nodes = {
        torch_internals.op_name(node.target): node for node in program.graph.nodes if node.op == "call_function"
    }
    assert {"aten.linear", "aten.dropout", "aten.relu_", "aten.mul"} <= nodes.keys()
    assert torch_internals.module_path(nodes["aten.linear"]) == "block.0"
    assert torch_internals.module_path(nodes["aten.mul"]) == ""
    size = nodes["aten.linear"].meta["val"].shape[0]
    assert torch_internals.is_symbolic(size)
    assert len(torch_internals.symbols(size)) == 1
    assert [torch_internals.size_at(size, batch) for batch in (1, 7)] == [1, 7]
    in_spec, out_spec = torch_internals.call_structure(program)
    assert torch_internals.unflatten([1], in_spec) == ((1,), {})
    assert torch_internals.unflatten([1], out_spec) == {"out": 1}


def test_what_is_read_of_operators() -> None:
    aten = torch.ops.aten

    def uses(target):
        arguments, draws = torch_internals.operator_use(target)
        return {item.name: (item.written, item.aliased) for item in arguments}, draws

    written, aliased = uses(aten.relu_.default)[0]["self"]
    assert written
    assert aliased
    assert uses(aten.view.default)[0]["self"] == (False, True)
    assert uses(aten.split.Tensor)[0]["self"] == (False, True)
    assert uses(aten.linear.default)[0]["weight"] == (False, False)
    for target in (aten.dropout.default, aten.rand.default, aten.bernoulli_.float, aten.lstm.input):
        assert uses(target)[1], f"{target} draws random numbers"
    assert not uses(aten.linear.default)[1]
    assert torch_internals.operator_use(len) is None


def test_what_is_patched() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):  # noqa: ARG004
            return value

    classes = torch_internals.function_classes()
    assert Own in classes
    assert torch.utils.checkpoint.CheckpointFunction in classes
    assert not any(cls.__module__.startswith("torch._") for cls in classes)
    module = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, 2))
    torch_internals.swap_parameter(module, "weight", other)
    assert module.weight is other


def test_what_is_read_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid together where a stage has all of a layer's and they are on a GPU, else left alone."""
    module = nn.Sequential(nn.LSTM(2, 3), nn.GRU(3, 3, bias=False))
    names = [f"{place}.{name}" for place, layer in enumerate(module) for name in layer._flat_weights_names]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    laid: list[list[object]] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: laid.append(list(layer._flat_weights)))

    class OnGpu:
        is_cuda = True

    before = [list(layer._flat_weights) for layer in module]
    all_there = {name: OnGpu() for name in names}
    torch_internals.flatten_recurrent(module, all_there)
    assert laid == [[all_there[name] for name in names[:4]], [all_there[name] for name in names[4:]]]
    torch_internals.flatten_recurrent(module, {**all_there, "0.bias_hh_l0": None})
    assert len(laid) == 3
    torch_internals.flatten_recurrent(module, dict(module.named_parameters()))
    assert len(laid) == 3
    for layer, own in zip(module, before, strict=True):
        assert all(one is other for one, other in zip(layer._flat_weights, own, strict=True))


def test_lstms_that_are_traced_whole_give_the_same_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_gnmt(layers=4, hidden=8, vocabulary=30, sequence=5, with_loss=True)
    operation = torch.ops.aten.lstm.input
    kernels = dict(operation.py_kernels)
    assert kernels, "torch finds shapes of an LSTM in another way"
    found = capture(*built, check=False)
    assert operation.py_kernels == kernels
    monkeypatch.setattr(export, "lstms_traced_whole", nullcontext)
    expected = capture(*built, check=False)
    assert found.fingerprint == expected.fingerprint
    assert [_shapes(node) for node in found.program.steps] == [_shapes(node) for node in expected.program.steps]
    last = len(found.layers) - 1
    for cut in range(last):
        assert found.stage(cut + 1, last).stage_source == expected.stage(cut + 1, last).stage_source


@pytest.mark.filterwarnings("ignore:.*assigned during export", "ignore:LSTM with projections")
@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"batch_first": True}, {"num_layers": 2}, {"proj_size": 3}]
)
def test_shapes_of_a_traced_lstm(options: dict[str, int | bool]) -> None:
    lstm = nn.LSTM(6, 8, **options)
    given = torch.randn(4, 5, 6)
    real, (hidden, cell) = lstm(given)
    with torch_internals.lstms_traced_whole():
        program = torch.export.export(lstm, (given,), strict=False)
    node = next(item for item in program.graph.nodes if item.target == torch.ops.aten.lstm.input)
    traced = node.meta["val"]
    assert [tuple(item.shape) for item in traced] == [tuple(item.shape) for item in (real, hidden, cell)]
    assert torch.equal(program.module()(given)[0], real)


def _shapes(node: torch.fx.Node) -> list[str]:
    values = node.meta.get("val")
    made = values if isinstance(values, (list, tuple)) else [values]
    return [f"{tuple(item.shape)} {item.stride()}" for item in made if isinstance(item, torch.Tensor)]


def test_the_tracer_is_loaded_beside_other_work() -> None:
    thread = torch_internals.load_tracer()
    thread.join(120)
    assert not thread.is_alive()
    assert "torch.export._trace" in sys.modules

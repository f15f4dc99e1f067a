"""The zoo is what the paper's tables are about, to the unit."""

from __future__ import annotations

import importlib

import pytest
import torch

from bapipe.errors import BaPipeError
from bapipe.models.builtin import builtin_model
from bapipe.torch.capturing import capture, empty_parameters
from bapipe.torch.zoo import (
    GNMT,
    VGG16,
    ResNet50,
    build_gnmt,
    build_gpt,
    build_resnet50,
    build_unet,
    build_vgg16,
)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


WEIGHTS = {32: 445.62, 42: 550.56, 60: 739.45, 74: 886.37, 118: 1348.10, 158: 1767.86}
"""millions of parameters of GNMT-L"""


def gnmt_parameters(half: int, hidden: int = 1024, vocabulary: int = 32320) -> int:
    def lstm(inputs: int) -> int:
        return 4 * hidden * (inputs + hidden) + 8 * hidden

    encoder = 2 * lstm(hidden) + lstm(2 * hidden) + (half - 2) * lstm(hidden)
    decoder = lstm(hidden) + 2 * hidden**2 + 2 * hidden + 1 + (half - 1) * lstm(2 * hidden)
    return encoder + decoder + 3 * vocabulary * hidden + vocabulary


def test_parameters_to_the_unit() -> None:
    with empty_parameters():
        assert count(VGG16()) == 138_357_544
        assert count(ResNet50()) == 25_557_032
        for layers, millions in WEIGHTS.items():
            module = GNMT(layers=layers)
            assert count(module) == gnmt_parameters(layers // 2)
            assert round(count(module) / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("build", "table"),
    [(build_vgg16, "vgg16"), (build_resnet50, "resnet50"), (build_gnmt, "gnmt-8")],
)
def test_captured_zoo_agrees_with_the_tables(build, table: str) -> None:
    options = {"sequence": 6} if table.startswith("gnmt") else {}
    with empty_parameters():
        module, args, kwargs = build(with_loss=True, **options)
    model, known = capture(module, args, kwargs).to_model(), builtin_model(table, **options)
    assert model.parameters == known.parameters
    flops = sum(layer.forward_flops for layer in known.layers)
    assert sum(layer.forward_flops for layer in model.layers) == pytest.approx(flops, rel=0.01)
    if table == "vgg16":
        for mine, theirs in zip(model.layers, known.layers, strict=True):
            assert mine.forward_flops == theirs.forward_flops
            assert mine.parameters == theirs.parameters
            assert mine.conv == theirs.conv or mine.kind == "linear"
            assert mine.split.channels == theirs.split.channels
        assert [layer.output_elements for layer in model.layers[:-1]] == [
            layer.output_elements for layer in known.layers[:-1]
        ]


SMALL = {
    "vgg": lambda **options: build_vgg16(width=4, hidden=16, image=32, classes=5, **options),
    "resnet": lambda **options: build_resnet50(width=4, image=32, classes=5, **options),
    "gnmt": lambda **options: build_gnmt(layers=4, hidden=8, sequence=4, vocabulary=20, **options),
    "gpt": lambda **options: build_gpt(blocks=1, width=8, vocabulary=20, sequence=4, dropout=0.0, **options),
    "unet": lambda **options: build_unet(levels=1, width=4, image=8, **options),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_inside_is_the_loss_beside(name: str) -> None:
    source = importlib.import_module(f"bapipe.torch.zoo.{name}")
    torch.manual_seed(0)
    module, args, kwargs = SMALL[name](with_loss=True, float64=True)
    assert module.training
    module.eval()
    assert torch.equal(module(*args, **kwargs), source.loss(module(*args), kwargs["target"]))
    again = SMALL[name]()
    assert again[2] == {}
    assert all(one.shape == two.shape for one, two in zip(args, again[1], strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_batches_differ_by_seed(name: str) -> None:
    make_batch = importlib.import_module(f"bapipe.torch.zoo.{name}").make_batch
    first, again, other = make_batch(1, 3), make_batch(1, 3), make_batch(2, 3)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    assert len(first[1]) == 3


def test_wrong_sizes() -> None:
    with pytest.raises(BaPipeError, match="even number of layers of at least 4, got 7"):
        build_gnmt(layers=7)
    with pytest.raises(BaPipeError, match="width must be a multiple of heads, got 10 and 4"):
        build_gpt(width=10)
    with pytest.raises(BaPipeError, match="batch must be at least 1, got 0"):
        build_vgg16(batch=0)

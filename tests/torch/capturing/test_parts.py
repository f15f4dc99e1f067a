"""Parts of a layer on several stages are the whole layer: gradients, loss and statistics, run in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured, Stage, capture
from bapipe.torch.capturing.graph_cleanup import correct_states
from bapipe.torch.zoo.gnmt import build_gnmt
from bapipe.torch.zoo.gpt import build_gpt
from bapipe.torch.zoo.resnet import build_resnet50
from bapipe.torch.zoo.unet import build_unet
from bapipe.torch.zoo.vgg import build_vgg16
from split_models import SPLIT_MODELS, build_split_model

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], Built]] = {
    **{name: lambda name=name: build_split_model(name) for name in SPLIT_MODELS},  # type: ignore[misc]
    "gnmt": lambda: build_gnmt(
        layers=4, batch=2, sequence=5, hidden=6, vocabulary=20, with_loss=True, float64=True
    ),
    "vgg": lambda: build_vgg16(image=32, width=4, hidden=12, classes=7, float64=True),
    "gpt": lambda: build_gpt(
        blocks=2, width=8, heads=2, vocabulary=20, sequence=4, tied=False, with_loss=True, float64=True
    ),
    "resnet": lambda: build_resnet50(image=32, width=4, classes=7, float64=True),
    "unet": lambda: build_unet(image=16, levels=2, width=4, classes=4, with_loss=True, float64=True),
}
DIVIDED = {
    "pictures": {"first", "second", "hidden", "head"},
    "words": {"embedding", "both_ways", "between", "one_way", "classifier"},
}
"""layers that must divide"""
WAYS = {
    "embedding": "output channels",
    "both_ways": "directions",
    "one_way": "time steps",
    "classifier": "vocabulary",
    "between": "output channels",
}


@pytest.fixture(scope="module")
def captured() -> Callable[[str], Captured]:
    known: dict[str, Captured] = {}

    def of(name: str) -> Captured:
        if name not in known:
            torch.manual_seed(0)
            module, args, kwargs = MODELS[name]()
            known[name] = capture(module, args, kwargs, check=False)
        return known[name]

    return of


def _fresh(captured: Captured) -> Captured:
    """With memory of its own, as another rank has it."""
    return replace(captured, module=copy.deepcopy(captured.module))


def _run(captured: Captured, stages: Sequence[Stage], leaves: Sequence[Any]) -> float:
    """Forward and backward through the stages as ranks would run them; the loss."""
    values: list[Tensor] = []
    taken = []
    for stage in stages:
        spec = stage.stage_spec
        stage.rng_position = (0, 0)
        received = [
            value.detach().contiguous().clone().requires_grad_(about.requires_grad)
            for value, about in zip(values, spec.received, strict=True)
        ]
        for value, about in zip(received, spec.received, strict=True):
            assert tuple(value.shape) == about.shape(captured.batch)
            assert value.dtype == about.dtype
        values = list(stage(*received, *(leaves[root.index] for root in spec.roots)))
        taken.append((received, values))
    output = captured.output(values)
    first = output if isinstance(output, Tensor) else output[0]
    wave = torch.arange(first.numel(), dtype=first.dtype).cos().view_as(first)
    loss = first if first.ndim == 0 else (first * wave).mean()
    errors: list[Tensor | None] = []
    for number, (received, made) in enumerate(reversed(taken)):
        if number == 0:
            loss.backward()
        else:
            pairs = [(a, b) for a, b in zip(made, errors, strict=True) if a.requires_grad and b is not None]
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
        errors = [value.grad for value in received]
    return float(loss.detach())


def _state(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Gradients and saved buffers of the whole model, put together from the stages'."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():
            trained = isinstance(tensor, nn.Parameter)
            value, part = tensor.grad if trained else tensor, stage.stage_slices.get(name)
            if value is None:
                continue
            key = f"{'gradient' if trained else 'buffer'} of {name}"
            shape = list(value.shape)
            if part is not None:
                shape[part.dim] = part.of
            if part is None and not trained:
                assert key not in found or torch.equal(found[key], value), "holders of a buffer disagree"
                found[key] = value.clone()
                continue
            whole = found.setdefault(key, torch.zeros(shape, dtype=value.dtype))
            place = whole if part is None else whole.narrow(part.dim, part.start, part.size)
            place.add_(value.detach())
    return found


def _leaves(captured: Captured) -> list[Any]:
    args, kwargs = captured.examples.resized(captured.batch).tree()
    return captured.input_leaves(args, kwargs)


def _whole(captured: Captured) -> tuple[float, dict[str, Tensor]]:
    stages = [_fresh(captured).stage(0, len(captured.layers) - 1)]
    return _run(captured, stages, _leaves(captured)), _state(stages)


def _divided(captured: Captured, layer: int, cuts: Sequence[int]) -> list[Stage]:
    """The layer on len(cuts) + 1 stages, from 0 to the first cut, on to the next, …"""
    split = captured.layers[layer].split
    assert split is not None
    last = len(captured.layers) - 1
    edges = [0, *cuts, split.channels]
    stages = []
    for number, part in enumerate(itertools.pairwise(edges)):
        first = 0 if number == 0 else layer
        end = last if number == len(cuts) else layer
        stages.append(_fresh(captured).stage(first, end, parts={layer: part}))
    return stages


def _check(captured: Captured, layer: int, cuts: Sequence[int], truth: tuple[float, dict[str, Tensor]]) -> None:
    stages = _divided(captured, layer, cuts)
    loss, found = _run(captured, stages, _leaves(captured)), _state(stages)
    expected_loss, expected = truth
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert found.keys() == expected.keys()
    # The gradient of a bias before batch-norm is nought but for rounding.
    scale = max(float(value.abs().max()) for key, value in expected.items() if key.startswith("gradient")) / 1000
    for key, value in expected.items():
        largest = float(value.abs().max()) if value.is_floating_point() else 1.0
        difference = float((found[key] - value).abs().max())
        assert difference <= 1e-12 * max(largest, scale), f"{key} with {captured.layers[layer].name} at {cuts}"


def _cuts(channels: int) -> list[tuple[int, ...]]:
    """One after the first channel, one before the last, one between, and into three parts."""
    found = {(1,), (channels - 1,), (channels // 3 or 1,)}
    if channels > 2:
        found.add((channels // 3, channels - 1) if channels > 3 else (1, 2))
    return sorted(found)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_divides(captured: Callable[[str], Captured], name: str) -> None:
    model = captured(name)
    truth = _whole(model)
    divided = [index for index, layer in enumerate(model.layers) if layer.split is not None]
    names = {model.layers[index].name for index in divided}
    assert names >= DIVIDED.get(name.partition("-")[0], set())
    assert divided
    for number, index in enumerate(divided):
        split = model.layers[index].split
        assert split is not None
        cuts = _cuts(split.channels)
        # A stage takes a while to build: of many layers each has one of the cuts.
        for chosen in cuts if len(divided) < 8 else [cuts[number % len(cuts)]]:
            _check(model, index, chosen, truth)


def test_ways_to_divide(captured: Callable[[str], Captured]) -> None:
    model = captured("words")
    found = {layer.name: layer.split.by for layer in model.layers if layer.split is not None}
    assert found == WAYS


def test_two_layers_at_the_ends_of_a_stage(captured: Callable[[str], Captured]) -> None:
    """A stage with the rest of one layer and the beginning of another."""
    for name, one, two in (("pictures-dropout", "first", "hidden"), ("words-ignored", "both_ways", "classifier")):
        model = captured(name)
        truth = _whole(model)
        names = [layer.name for layer in model.layers]
        first, second = names.index(one), names.index(two)
        channels = [model.layers[index].split.channels for index in (first, second)]  # type: ignore[union-attr]
        stages = [
            _fresh(model).stage(0, first, parts={first: (0, 1)}),
            _fresh(model).stage(first, second, parts={first: (1, channels[0]), second: (0, 3)}),
            _fresh(model).stage(second, len(names) - 1, parts={second: (3, channels[1])}),
        ]
        assert _run(model, stages, _leaves(model)) == pytest.approx(truth[0], rel=1e-12)
        found = _state(stages)
        for key, value in truth[1].items():
            assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-13), key


def test_evaluation_of_parts(captured: Callable[[str], Captured]) -> None:
    """Without dropout, and with running statistics of batch-norm."""
    model = captured("pictures-dropout")
    names = [layer.name for layer in model.layers]
    index, leaves = names.index("first"), _leaves(model)
    own = _fresh(model)
    own.module.eval()
    expected = own.module(*leaves)
    one = own.stage(0, index, parts={index: (0, 2)}, training=False)
    two = own.stage(index, len(names) - 1, parts={index: (2, 6)}, training=False)
    (found,) = two(*one(*leaves), *(leaves[root.index] for root in two.stage_spec.roots))
    assert torch.allclose(found, expected, rtol=1e-12)


def test_what_does_not_divide_is_refused(captured: Callable[[str], Captured]) -> None:
    model = captured("gpt")
    fixed = next(index for index, layer in enumerate(model.layers) if layer.split is None)
    with pytest.raises(BaPipeError, match="cannot be split; plan without --split-layers"):
        model.stage(0, fixed, parts={fixed: (0, 1)})


def test_states_of_an_lstm_have_the_shape_of_those_it_takes() -> None:
    """As torch 2.11 traces them, with a dimension too many, a stage would be sent what its LSTM cannot take."""
    module, args, kwargs = MODELS["gnmt"]()
    graph = capture(module, args, kwargs, check=False).program.graph
    (node, *_) = [item for item in graph.nodes if "lstm" in str(item.target)]
    output, *states = node.meta["val"]
    node.meta["val"] = (output, *(state.unsqueeze(0) for state in states))
    correct_states(graph)
    assert [value.shape for value in node.meta["val"]] == [output.shape, *(state.shape for state in states)]

"""Layers that recompute inside of a stage: the same numbers, and no more held than the memory model says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_stage_memory import SIZE, _each_alone, _Storages
from torch import Tensor, nn

from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.models.layers import ModelRef
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, StageLayers
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.profiler import MeasureSettings, measure_loop, profile_module
from bapipe.torch.stage.activation_checkpoints import checkpoint_layers
from bapipe.torch.stage.forward_watch import ForwardWatch
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.runner import StageRunner

COUNT = 3
CPU = torch.device("cpu")
Runs = Sequence[tuple[int, int]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dropout(self.narrow(torch.tanh(self.wide(self.norm(x)))))
        return x + self.statistics(inner)


class _Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(4))
        self.head = nn.Linear(width, 11)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(1)
    return capture(_Model().double(), (torch.randint(0, 11, (SIZE,)),), check=False)


def _trained(
    captured: Captured,
    runs: Runs,
    *,
    first: int,
    split: bool,
    programs: CompiledPrograms | None = None,
    mixed: MixedForward | None = None,
) -> tuple[dict[str, Tensor | None], dict[str, Tensor], list[Any]]:
    """Gradients, statistics and input gradients of three micro-batches of the stage from layer `first` on."""
    last = len(captured.layers) - 1
    layers = StageLayers(first=first, last=last, parts={}, store={})
    before = {name: buffer.clone() for name, buffer in captured.module.named_buffers()}
    stage = captured.stage(first, last)
    if programs is not None:
        programs.attach(stage, captured, layers)
    if runs:
        checkpoint_layers(stage, captured, layers, runs, CPU)
    loss = LossSum(nn.functional.cross_entropy, [SIZE] * COUNT)
    runner = StageRunner(
        0, {SIZE: stage}, sizes=[SIZE] * COUNT, split=split, loss=loss, output=captured.output, mixed=mixed
    )
    chance = torch.Generator().manual_seed(5)
    words, targets = ([torch.randint(0, 11, (SIZE,), generator=chance) for _ in range(COUNT)] for _ in range(2))
    received = [
        tuple(
            torch.randn([each * SIZE + more for each, more in about.dims], generator=chance, dtype=about.dtype)
            for about in stage.stage_spec.received
        )
        for _ in range(COUNT)
    ]
    loss.begin()
    runner.begin(0, [[item] for item in words], targets)
    for number in range(COUNT):
        runner.forward(number, received[number])
    sent = [(runner.input_gradient if split else runner.backward)(number, []) for number in range(COUNT)]
    for number in range(COUNT if split else 0):
        runner.weight_gradient(number)
    assert runner.idle
    runner.end()
    gradients = {name: item.grad for name, item in stage.named_parameters()}
    statistics = {name: buffer.clone() for name, buffer in captured.module.named_buffers()}
    for name, buffer in captured.module.named_buffers():
        buffer.copy_(before[name])
    for parameter in captured.module.parameters():
        parameter.grad = None
    return gradients, statistics, sent


def _assert_same(one: Any, other: Any, *, rtol: float = 1e-12) -> None:
    for left, right in zip(one[:2], other[:2], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=1e-14, msg=name)
    for left, right in zip(one[2], other[2], strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-14)


ALL: dict[str, Runs] = {
    "first": [(0, 0)],
    "two runs": [(1, 2), (4, 4)],
    "last": [(5, 5)],
    "each": [(layer, layer) for layer in range(6)],
    "all at once": [(0, 5)],
}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("runs", ALL.values(), ids=ALL.keys())
def test_gradients_and_statistics_are_the_same(captured: Captured, runs: Runs, split: bool) -> None:
    for first in (0, 2):
        own = [(max(low, first), high) for low, high in runs if high >= first]
        plain = _trained(captured, (), first=first, split=False)
        _assert_same(plain, _trained(captured, own, first=first, split=split))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_compiled_layers_recompute_too(captured: Captured, split: bool) -> None:
    programs = CompiledPrograms(CPU, split=split, backend="aot_eager")
    plain = _trained(captured, (), first=1, split=False)
    _assert_same(plain, _trained(captured, [(1, 2), (4, 4)], first=1, split=split, programs=programs))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_autocast_is_as_it_was(split: bool) -> None:
    torch.manual_seed(1)
    own = capture(_Model(), (torch.randint(0, 11, (SIZE,)),), check=False)
    mixed = MixedForward(CPU, torch.bfloat16)
    with mixed.batch():
        plain = _trained(own, (), first=0, split=split, mixed=mixed)
    with mixed.batch():
        again = _trained(own, [(1, 1), (3, 4)], first=0, split=split, mixed=mixed)
    _assert_same(plain, again, rtol=1e-6)


def test_a_value_that_is_not_finite_is_found_in_its_layer(captured: Captured) -> None:
    last = len(captured.layers) - 1
    stage = captured.stage(0, last)
    checkpoint_layers(stage, captured, StageLayers(first=0, last=last, parts={}, store={}), [(1, 2)], CPU)
    name, weight = next(
        (n, p) for n, p in captured.module.named_parameters() if n.endswith("blocks.1.wide.weight")
    )
    with torch.no_grad():
        kept = weight.clone()
        weight[0, 0] = float("nan")
        watch = ForwardWatch()
        watch.run(stage, (torch.zeros(SIZE, dtype=torch.long),))
        weight.copy_(kept)
    assert watch.found is not None
    assert watch.found.layer == captured.layers[2].name, name
    assert watch.found.value == "nan"


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captured, Chain]:
    torch.manual_seed(0)
    module, args = _Model(64), (torch.randint(0, 11, (SIZE,)),)
    folder: Path = tmp_path_factory.mktemp("cache")
    settings = MeasureSettings(microbatches=(SIZE,), folder=folder, seconds=0.001, iterations=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_loop, "find_units", _each_alone)
        profile = profile_module(module, args, {}, model=ModelRef(name="blocks"), settings=settings).profile
    return capture(module, args, check=False), make_chain(profile, tuple(profile.accelerators), SIZE)


@pytest.mark.parametrize("runs", [(), ((1, 1),), ((2, 3),), ((1, 1), (2, 2), (3, 3), (4, 4))])
@pytest.mark.parametrize("parted", [False, True], ids=["whole", "split"])
def test_a_stage_holds_what_the_memory_model_says(
    weighed: tuple[Captured, Chain], runs: tuple[tuple[int, int], ...], parted: bool
) -> None:
    captured, chain = weighed
    first, last = 1, 4
    stage = captured.stage(first, last)
    if runs:
        checkpoint_layers(stage, captured, StageLayers(first=first, last=last, parts={}, store={}), runs, CPU)
    runner = StageRunner(0, {SIZE: stage}, sizes=[SIZE] * COUNT, split=parted)
    runner.begin(0, [()] * COUNT, [None] * COUNT)
    forward, waiting = [], []
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with _Storages() as storages:
        for number in range(COUNT):
            before = storages.held()
            values = tuple(
                torch.randn([each * SIZE + more for each, more in item.dims]) for item in stage.stage_spec.received
            )
            made = runner.forward(number, values)
            del values
            forward.append(storages.held() - before)
            errors = [torch.randn_like(item) for item in made]
            del made
            sent = (runner.input_gradient if parted else runner.backward)(number, errors)
            del sent, errors
            waiting.append(storages.held() - before)
        for number in range(COUNT if parted else 0):
            runner.weight_gradient(number)
    said = stage_bytes(recomputing(chain, runs), first, last, parted=parted)
    buffers = sum(
        item.nbytes for name, item in stage.named_buffers() if any(_layer(name) in _named(run) for run in runs)
    )
    assert forward[1] - buffers == pytest.approx(said.saved_activations, rel=0.06)
    if parted:
        assert waiting[1] == pytest.approx(said.delayed, rel=0.08)
    else:
        assert waiting[1:] == [0] * (COUNT - 1)


def _layer(name: str) -> str:
    return name.split(".")[1]


def _named(run: tuple[int, int]) -> set[str]:
    """The numbers of the blocks that a run of layers has."""
    return {str(layer - 1) for layer in range(run[0], run[1] + 1)}

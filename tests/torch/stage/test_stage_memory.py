"""What a stage holds of a micro-batch, storage by storage, against what the memory model says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.models.layers import ModelRef
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.part_ops import lstm_steps
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.profiler import MeasureSettings, measure_loop, profile_module
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.runner import StageRunner
from bapipe.torch.zoo.gnmt import build_gnmt

SIZE, COUNT = 4, 5


class _Storages(TorchDispatchMode):
    """Every storage that an operation made, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return made

    def held(self) -> int:
        self._made = {key: item for key, item in self._made.items() if not item[0].expired()}
        return sum(size for _, size in self._made.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captured, Chain]:
    torch.manual_seed(0)
    module, args, kwargs, *_ = build_gnmt(layers=4, hidden=64, vocabulary=512, sequence=12, with_loss=True)
    folder: Path = tmp_path_factory.mktemp("cache")
    settings = MeasureSettings(microbatches=(SIZE,), folder=folder, seconds=0.001, iterations=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measure_loop, "find_units", _each_alone
        )  # layers so small would be weighed together, by chance
        profile = profile_module(module, args, kwargs, model=ModelRef(name="gnmt"), settings=settings).profile
    return capture(module, args, kwargs, check=False), make_chain(profile, tuple(profile.accelerators), SIZE)


def _each_alone(forward: Sequence[Any], *_: Any) -> tuple[Any, ...]:
    return tuple((layer, layer) for layer in range(len(forward))), (1.0,) * len(forward), (1.0,) * len(forward)


def held_by(
    captured: Captured,
    first: int,
    last: int,
    *,
    parted: bool = True,
    parts: dict[int, tuple[int, int]] | None = None,
) -> tuple[list[int], list[int]]:
    """Bytes that each micro-batch adds with its forward, and that are left of them after its input gradient, or,
    not `parted`, after its backward."""
    stage = captured.stage(first, last, parts=parts)
    spec, ends = stage.stage_spec, last == len(captured.layers) - 1
    sizes = [SIZE] * COUNT
    loss = LossSum(None, sizes) if ends else None
    output = captured.output if ends else None
    runner = StageRunner(0, {SIZE: stage}, sizes=sizes, split=parted, loss=loss, output=output)
    leaves = flatten(captured.examples.resized(SIZE).tree())[0]
    forward, waiting = [], []
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if loss is not None:
        loss.begin()
    runner.begin(0, [leaves] * COUNT, [None] * COUNT)
    with _Storages() as storages:
        for number in range(COUNT):
            before = storages.held()
            values = tuple(torch.randn([each * SIZE + more for each, more in item.dims]) for item in spec.received)
            made = runner.forward(number, values)
            del values
            forward.append(storages.held() - before)
            errors = [
                torch.randn_like(item) for item, about in zip(made, spec.sent, strict=False) if about.requires_grad
            ]
            del made
            sent = (runner.input_gradient if parted else runner.backward)(number, errors)
            del sent, errors
            waiting.append(storages.held() - before)
        for number in range(COUNT if parted else 0):
            runner.weight_gradient(number)
    runner.end()
    # At the first micro-batch both parts run at once.
    return forward[1:], waiting[1:]


def test_what_only_passes_a_layer_by_is_told(model: tuple[Captured, Chain]) -> None:
    """The encoder's output goes past the target's embedding and the first decoder to the attention."""
    chain = model[1]
    names = [layer.name for layer in chain.profile.layers]
    memory = SIZE * 12 * 64 * 4
    assert dict(zip(names, chain.passing.tolist(), strict=True)) == {
        **dict.fromkeys(names, 0.0),
        "target_embedding": memory,
        "decoder.0": memory,
    }


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(5, 6, id="attention"),
        pytest.param(7, 7, id="classifier"),
    ],
)
def test_a_micro_batch_that_waits_holds_what_was_weighed(
    model: tuple[Captured, Chain], first: int, last: int
) -> None:
    captured, chain = model
    forward, waiting = held_by(captured, first, last)
    said = stage_bytes(chain, first, last)
    assert len(set(waiting)) == 1, "every micro-batch holds as much"
    assert forward[0] == pytest.approx(said.saved_activations, rel=0.06)
    assert waiting[0] == pytest.approx(said.delayed, rel=0.05)


@pytest.mark.parametrize("parted", [False, True])
def test_what_only_the_layer_before_keeps_is_not_in_a_stage(model: tuple[Captured, Chain], parted: bool) -> None:
    """Of what it received a stage keeps what its own backward needs, unless that is done in two parts."""
    captured, chain = model
    layers = chain.saved_before.nonzero()[0].tolist()
    assert layers
    for first in layers:
        forward, _ = held_by(captured, first, first, parted=parted)
        said = stage_bytes(chain, first, first, parted=parted).saved_activations
        assert forward[0] == pytest.approx(said, rel=0.06)


@pytest.mark.parametrize(("layer", "keeps"), [("encoder.1", True), ("decoder.0", False), ("decoder.1", False)])
def test_a_stage_that_begins_inside_a_layer_keeps_of_its_input_what_the_layer_does(
    model: tuple[Captured, Chain], layer: str, keeps: bool
) -> None:
    """And all of it, with what the first part made, where its backward is done in two parts."""
    captured, chain = model
    profile = chain.profile
    index = [item.name for item in profile.layers].index(layer)
    divided = make_chain(profile, chain.types, SIZE, split={index: 2})
    begin = next(place for place, unit in enumerate(divided.units) if unit.layer == index and unit.start > 0)
    unit = divided.units[begin]
    (whole,), (apart,) = (
        {*held_by(captured, index, index, parted=parted, parts={index: (unit.start, unit.of)})[0]}
        for parted in (False, True)
    )
    said = [stage_bytes(divided, begin, begin, parted=parted).saved_activations for parted in (False, True)]
    made = SIZE * unit.start * 64 * 4
    assert apart - whole == said[1] - said[0] + made
    assert (said[1] == said[0]) is keeps


def test_a_stage_without_weight_gradients_to_put_off_holds_nothing(model: tuple[Captured, Chain]) -> None:
    """An LSTM's library makes them with the errors: when these are sent, all is let go."""
    _, waiting = held_by(model[0], 6, 6)
    assert waiting == [0] * len(waiting)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_backward_does_not_need_of_the_input_is_let_go(
    model: tuple[Captured, Chain], recompute: bool
) -> None:
    """An LSTM keeps what the dropout before it makes, and the dropout a mask: the received value is not needed."""
    stage = model[0].stage(6, 6)
    runner = StageRunner(6, {SIZE: stage}, sizes=[SIZE], recompute=recompute)
    runner.begin(0, [()], [None])
    (about,) = stage.stage_spec.received
    value = torch.randn([each * SIZE + more for each, more in about.dims])
    shape, kept = value.shape, StorageWeakRef(value.untyped_storage())
    made = runner.forward(0, (value,))
    del value
    assert kept.expired() is not recompute
    if recompute:
        runner.again(0)
        assert kept.expired()
    (error,) = runner.backward(0, [torch.randn_like(item) for item in made])
    assert error.shape == shape
    assert runner.idle


@pytest.mark.parametrize("alone", [True, False])
def test_some_steps_of_an_lstm_keep_their_own_input_only(alone: bool) -> None:
    """A slice of a value that nobody else has is copied: what is kept for the backward would be all of it."""
    lstm = nn.LSTM(8, 8)
    value = torch.randn(12, SIZE, 8, requires_grad=True).mul(2.0)
    kept = StorageWeakRef(value.untyped_storage())
    state = [torch.zeros(1, SIZE, 8) for _ in range(2)]
    made = lstm_steps(value, state, list(lstm.parameters()), True, False, 0, 3, alone)
    del value
    assert kept.expired() is alone
    made[0].sum().backward()


def test_what_is_made_for_an_lstm_is_for_it_alone() -> None:
    """What encoder.1 and decoder.0 take has been received; before the others a dropout runs on their own stage."""
    module, args, kwargs, *_ = build_gnmt(layers=6, hidden=16, vocabulary=32, sequence=12, with_loss=True)
    captured = capture(module, args, kwargs, check=False)
    names = [layer.name for layer in captured.layers]
    found = {}
    for name in ("encoder.1", "encoder.2", "decoder.0", "decoder.1", "decoder.2"):
        layer = names.index(name)
        source = captured.stage(layer, layer, parts={layer: (0, 3)}).stage_source
        (found[name],) = re.findall(r"lstm_steps\(.*, (True|False)\)", source)
    apart = {"encoder.1": "False", "decoder.0": "False"}
    assert found == {**apart, "encoder.2": "True", "decoder.1": "True", "decoder.2": "True"}

"""Reassembled from isolated stages at any cut: loss, outputs, buffers and every gradient as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import capture_models as models
from bapipe.torch.capturing import Captured, capture, largest_difference, run_eager, run_stages
from bapipe.torch.zoo import build_gnmt, build_gpt, build_resnet50, build_unet, build_vgg16

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
FLOAT64 = 1e-12


def built(module: nn.Module, *args: Any, **kwargs: Any) -> Built:
    return module.double(), args or (models.sample(),), kwargs


TOKENS = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
CASES: dict[str, Callable[[], Built]] = {
    "vgg16": lambda: build_vgg16(width=8, hidden=32, image=32, classes=10, float64=True, with_loss=True),
    "resnet50": lambda: build_resnet50(width=4, image=32, classes=10, float64=True, with_loss=True),
    "gnmt": lambda: build_gnmt(layers=8, hidden=8, sequence=5, vocabulary=30, float64=True, with_loss=True),
    "gpt-tied": lambda: build_gpt(blocks=2, width=16, vocabulary=30, sequence=6, float64=True, with_loss=True),
    "gpt-no-loss": lambda: build_gpt(blocks=2, width=16, vocabulary=30, sequence=6, float64=True, tied=False),
    "unet": lambda: build_unet(levels=2, width=4, image=16, float64=True, with_loss=True),
    "dataclass-output": lambda: built(models.DataclassOutput()),
    "nested": lambda: built(
        models.NestedInputs(),
        {"x": [models.sample()], "mask": torch.ones(4)},
        True,
        mask=None,
        scale=torch.tensor(2.0, dtype=torch.float64),
    ),
    "kinds-of-values": lambda: built(models.KindsOfValues()),
    "buffers": lambda: built(models.BufferWriter()),
    "in-place": lambda: built(models.InPlace()),
    "input-written": lambda: built(models.InputWriter()),
    "spectral-norm": lambda: built(models.SpectralNorm()),
    "autocast-region": lambda: built(models.AutocastRegion()),
    "input-with-gradient": lambda: built(models.InputWithGradient(), models.sample().requires_grad_()),
    "same-layer-twice": lambda: built(models.SameLayerTwice()),
    "rotary": lambda: built(models.Rotary(), TOKENS),
    "recurrent": lambda: built(models.Recurrent(), models.sample(4, 5, models.WIDTH)),
    "experts": lambda: built(models.Experts()),
    "transformer": lambda: built(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        models.sample(4, 5, 8),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Built, Captured]:
    torch.manual_seed(0)
    model = CASES[request.param]()
    return request.param, model, capture(*model)


def test_every_cut_and_every_size(case: tuple[str, Built, Captured]) -> None:
    _, (module, args, kwargs), captured = case
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert captured.checked is not None
    assert captured.checked <= FLOAT64
    expected = run_eager(module, args, kwargs)
    assert expected.gradients
    for cut in range(1, len(captured.layers)):
        difference, what = largest_difference(run_stages(captured, [cut], args, kwargs, isolate=True), expected)
        assert difference <= FLOAT64, f"{what} at layer {cut}"
    assert captured.dynamic
    for batch in (1, 3, 5) if "bn1.weight" not in before else (3, 5):
        others = captured.examples.resized(batch).tree()
        result = run_stages(captured, range(1, len(captured.layers)), *others, isolate=True)
        difference, what = largest_difference(result, run_eager(module, *others))
        assert difference <= FLOAT64, f"{what} at {batch} samples"
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"
    assert all(parameter.grad is None for parameter in module.parameters())


def test_random_numbers_are_the_same_under_any_partition() -> None:
    module, args, kwargs = CASES["gnmt"]()
    captured = capture(module, args, kwargs)
    assert len(captured.program.random) == 6
    whole = run_stages(captured, [], args, kwargs, position=(3, 1))
    for cuts, seed in (([4], 1), ([2, 5, 9], 2), (list(range(1, len(captured.layers))), 3)):
        difference, _ = largest_difference(
            run_stages(captured, cuts, args, kwargs, seed=seed, position=(3, 1)), whole
        )
        assert difference <= FLOAT64
    other = run_stages(captured, [4], args, kwargs, position=(3, 2))
    assert not torch.equal(other.loss, whole.loss)


def test_a_whole_run_of_the_graph_equals_eager_to_the_bit() -> None:
    module, args, kwargs = CASES["resnet50"]()
    captured = capture(module, args, kwargs)
    difference, _ = largest_difference(run_stages(captured, [], args, kwargs), run_eager(module, args, kwargs))
    assert difference == 0.0


def test_values_know_whether_they_have_a_gradient() -> None:
    module, args, kwargs = CASES["kinds-of-values"]()
    captured = capture(module, args, kwargs)
    stage = captured.stage(0, 0)
    sent = stage(*args)
    assert [value.requires_grad for value in stage.stage_spec.sent] == [value.requires_grad for value in sent]
    assert {value.dtype for value in stage.stage_spec.sent} >= {torch.float64}
    for value, tensor in zip(stage.stage_spec.sent, sent, strict=True):
        assert value.shape(4) == tuple(tensor.shape)
        assert value.dtype == tensor.dtype
        assert value.bytes(4) == tensor.nbytes == 4 * value.bytes_per_sample + value.bytes_fixed


def test_what_is_sent_is_contiguous_and_as_described() -> None:
    for name in ("gnmt", "unet", "rotary"):
        module, args, kwargs = CASES[name]()
        captured = capture(module, args, kwargs, check=False)
        leaves, values = captured.input_leaves(args, kwargs), ()
        for index in range(len(captured.layers)):
            stage = captured.stage(index, index)
            values = stage(*values, *(leaves[root.index] for root in stage.stage_spec.roots))
            for value, tensor in zip(stage.stage_spec.sent, values, strict=not stage.stage_spec.is_last):
                assert tuple(tensor.shape) == value.shape(captured.batch)
                assert tensor.is_contiguous()
                assert tensor.requires_grad == value.requires_grad


def test_autocast_while_running() -> None:
    module, args, kwargs = build_gpt(blocks=1, width=16, vocabulary=30, sequence=6, dropout=0.0, with_loss=True)
    captured = capture(module, args, kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = module(*args, **kwargs)
        (output,) = captured.stage(0, len(captured.layers) - 1)(*args, kwargs["target"])
    assert torch.equal(eager, output)

"""Compiled layers compute what captured ones do, and equal layers are compiled once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bapipe.torch.capturing import capture
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, StageLayers, warm_up
from compiled_models import SIZE, Trained, captured_of, train

CPU = torch.device("cpu")
CUTS = {"mlp": (2,), "blocks": (3,), "convolutions": (1,)}


@pytest.fixture
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for what inductor compiles, in this process: to start others takes longer than a few kernels."""
    from torch._inductor import config

    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        yield


def assert_same(found: Trained, wanted: Trained, tolerance: float) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=tolerance)
    for kind in ("gradients", "buffers"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = max(1.0, float(value.abs().max()))
            assert float((ours[name] - value).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("way", ["whole", "recomputed and split"])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_a_global_batch_gives_what_captured_layers_give(name: str, way: str) -> None:
    captured = captured_of(name)
    split, recompute = "split" in way, "recomputed" in way
    wanted = train(captured, CUTS[name], split=split, recompute=recompute)
    programs = CompiledPrograms(CPU, split=split, whole=not split, backend="graph")
    found = train(captured, CUTS[name], programs=programs, split=split, recompute=recompute)
    assert not programs.failed
    assert_same(found, wanted, 1e-12)


def test_equal_layers_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    captured = captured_of("blocks")
    programs = CompiledPrograms(CPU, backend="graph")
    with caplog.at_level(logging.INFO, logger="bapipe"):
        train(captured, CUTS["blocks"], programs=programs)
        train(captured, (2, 5), programs=programs)
    assert len(captured.layers) == 8
    # The embedding, an attention, an MLP, the last MLP, which the norm belongs to, and the head.
    assert programs.compiled == 5
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("bapipe")]
    assert len(lines) == 5
    assert lines[1].startswith("compiled layer 2 of 5 distinct ('blocks.0.attention'): ")


@pytest.mark.usefixtures("kernels")
def test_kernels_are_as_precise_as_captured_layers() -> None:
    """Distances from fp32 in bf16, over all gradients, as kernels of inductor compute them."""
    exact = train(captured_of("pair", torch.float32))
    captured = captured_of("pair", torch.bfloat16)
    programs = CompiledPrograms(CPU, whole=False, split=True)

    def distance(found: Trained) -> float:
        pairs = [(found.gradients[name].float(), value) for name, value in exact.gradients.items()]
        assert found.gradients.keys() == exact.gradients.keys()
        return sum(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs) / len(pairs)

    eager = distance(train(captured))
    assert 0 < eager < 0.1
    assert distance(train(captured, programs=programs, split=True)) <= 1.5 * eager
    assert not programs.failed
    assert programs.compiled == len(captured.layers) == 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(value))[0]).square().mean()


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_layer_that_is_not_compiled_runs_as_captured(caplog: pytest.LogCaptureFixture, split: bool) -> None:
    torch.manual_seed(0)
    captured = capture(Recurrent().double(), (torch.randn(SIZE, 3, 4).double(),), check=False)
    wanted = train(captured, (1,), split=split)
    programs = CompiledPrograms(CPU, split=split, backend="graph")
    found = train(captured, (1,), programs=programs, split=split)
    assert_same(found, wanted, 1e-12)
    assert list(programs.failed) == ["lstm"]
    assert programs.compiled == 2
    records = [record for record in caplog.records if record.name.startswith("bapipe")]
    warnings = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert warnings == [
        "layer 'lstm' is not compiled and runs as captured: "
        "a recurrent layer would be compiled time step by time step"
    ]


def test_what_the_compiler_refuses_runs_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of("mlp")
    wanted = train(captured)
    programs = CompiledPrograms(CPU, backend="graph")

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr("bapipe.torch.compiling.compiled_layers.compile_layer", refuse)
    assert_same(train(captured, programs=programs), wanted, 0.0)
    assert set(programs.failed.values()) == {"NotImplementedError: no kernel for this"}


def test_warming_up_compiles_and_changes_nothing() -> None:
    captured = captured_of("mlp")
    before = {name: item.clone() for name, item in captured.module.state_dict().items()}
    programs = CompiledPrograms(CPU, backend="graph")
    stage = captured.stage(1, 3)
    programs.attach(stage, captured, StageLayers(first=1, last=3, parts={}, store={}))
    state = torch.random.get_rng_state()
    warm_up(stage, captured, SIZE, CPU)
    assert programs.compiled == 2
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(item, before[name]) for name, item in captured.module.state_dict().items())
    assert all(item.grad is None for item in captured.module.parameters())

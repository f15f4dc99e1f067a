"""Compiled layers compute what captured ones do, and equal layers are compiled once."""

from __future__ import annotations

import pytest
import torch

from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from compiled_models import Trained, captured_of, train

CPU = torch.device("cpu")
CUTS = {"mlp": (2,), "blocks": (3,), "convolutions": (1,)}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kernels of this session are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def assert_same(found: Trained, wanted: Trained, tolerance: float) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=tolerance)
    for kind in ("gradients", "buffers"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            assert float((ours[name] - value).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_gradients_losses_and_buffers_are_those_of_captured_layers(
    name: str, split: bool, recompute: bool
) -> None:
    captured = captured_of(name)
    wanted = train(captured, CUTS[name], split=split, recompute=recompute)
    programs = CompiledPrograms(CPU, split=split, backend="graph")
    found = train(captured, CUTS[name], programs=programs, split=split, recompute=recompute)
    assert not programs.failed
    assert_same(found, wanted, 1e-12)

"""The structure of a model is the same however it is captured, and another where it computes something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing a model needs torch: pip install bapipe[torch]")

from torch import Tensor, nn  # noqa: E402

from bapipe.records.training_record import Structure  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.capturing.model_structure import structure_of  # noqa: E402
from bapipe.torch.checkpoint.training_changes import structure_difference  # noqa: E402


class Net(nn.Module):
    """Convolution, batch-norm, a table that no state_dict has, a constant, and sizes by the batch."""

    def __init__(self, activation: nn.Module, *, factor: float = 1.0, dropout: float = 0.0, swap: bool = False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.activation, self.dropout = activation, nn.Dropout(dropout)
        self.register_buffer("table", factor * torch.linspace(-1, 1, 4), persistent=False)
        self.first, self.second, self.swap = nn.Linear(64, 64), nn.Linear(64, 64), swap

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.conv(x))) * self.table[:, None, None]
        x = x.reshape(x.shape[0], -1)
        one, two = (self.second, self.first) if self.swap else (self.first, self.second)
        return two(self.dropout(one(x))).masked_fill(x > torch.tensor(3.0), float("-inf"))


def structure(module: nn.Module, *, batch: int = 2, dtype: Any = torch.float32) -> Structure:
    return structure_of(capture(module.to(dtype), (torch.zeros(batch, 2, 4, 4, dtype=dtype),), check=False))


def relu(**changes: Any) -> nn.Module:
    return Net(nn.ReLU(), **changes)


@functools.cache
def known() -> Structure:
    return structure(relu())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return relu()


@pytest.mark.parametrize(
    "made",
    [
        lambda: structure(relu(), batch=5),
        lambda: structure(relu(), dtype=torch.float64),
        lambda: structure(relu(), dtype=torch.bfloat16),
        lambda: structure(on_meta()),
        lambda: structure(relu().eval()),
    ],
    ids=["batch", "float64", "bfloat16", "meta", "evaluation"],
)
def test_how_a_model_is_captured_does_not_matter(made: Callable[[], Structure]) -> None:
    found, again = known(), made()
    assert found.sha256 == again.sha256
    assert found.modules == again.modules
    assert structure_difference(found, again) is None


def test_values_of_parameters_do_not_matter() -> None:
    torch.manual_seed(2)
    assert structure(relu()) == known()


def test_a_known_model_has_the_structure_that_earlier_versions_recorded() -> None:
    """In every process and on every version of torch. A change here refuses all checkpoints from before it."""
    assert known().sha256 == "c107b04295dece3ab61afd73d533b77ff427be84dc7fcd570e8b77bf8ddd3a13", known().modules


@pytest.mark.parametrize(
    "module, difference",
    [
        (Net(nn.GELU()), "'activation' computed aten.relu and computes aten.gelu"),
        (
            relu(dropout=0.5),
            "'dropout' computed aten.dropout(p=0.0, train=True) and computes aten.dropout(p=0.5, ",
        ),
        (relu(factor=1.001), "'table', which is in no checkpoint, has other values"),
        (relu(swap=True), "'first' was computed where 'second' is"),
    ],
    ids=["activation", "dropout", "table", "order"],
)
def test_another_computation_of_the_same_tensors_is_told(module: nn.Module, difference: str) -> None:
    saved = known()
    shapes = {name: tensor.shape for name, tensor in relu().state_dict().items()}
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == shapes
    found = structure_difference(saved, structure(module))
    assert found is not None
    assert found.startswith(difference)


def test_last_bits_of_a_table_do_not_matter() -> None:
    assert structure_difference(known(), structure(relu(factor=1 + 1e-7))) is None


class Whole(nn.Module):
    """Reads a number from a tensor, so it is kept whole."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(8, 8)

    def extra_repr(self) -> str:
        return f"width={self.width}, {object()}"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if float(x.sum()) > self.width else 1.0)


def test_a_module_that_is_kept_whole_is_told_by_its_options() -> None:
    def made(width: float) -> Structure:
        module = nn.Sequential(nn.Linear(8, 8), Whole(width))
        captured = capture(module, (torch.zeros(2, 8),), check=False)
        assert [item.path for item in captured.opaque] == ["1"]
        return structure_of(captured)

    assert made(1.0) == made(1.0)
    assert structure_difference(made(1.0), made(2.0)) is not None

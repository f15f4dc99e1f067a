"""`--check` compares with one process on the global batch, and sees micro-batches that are weighed wrongly."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch's: pip install bapipe[torch]")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from bapipe.torch.inputs.build_model import BuiltModel  # noqa: E402
from bapipe.torch.verify.gradient_check import compare_gradients, gradients, train_alone  # noqa: E402

SIZES = (2, 2, 2)
CLASSES, IGNORED = 4, -100


class Tokens(nn.Module):
    """Classifies every step of a sequence; may drop, normalise over the batch, and return its loss."""

    def __init__(self, *, dropout: float, norm: bool, own_loss: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(5, CLASSES)
        self.own_loss = own_loss

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        output = self.head(self.dropout(torch.tanh(hidden)))
        return _mean(output, target) if self.own_loss and target is not None else output


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target)


def _batch(seed: int, size: int = sum(SIZES)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (size, 4), generator=generator)
    for sample in range(size):
        target[sample, 1 + (sample + seed) % 4 :] = IGNORED
    return torch.randn(size, 4, 3, dtype=torch.float64, generator=generator), target


def _built(*, own_loss: bool = False, dtype: Any = torch.float64, **options: Any) -> BuiltModel:
    torch.manual_seed(0)
    module = Tokens(**{"dropout": 0.0, "norm": False, **options}, own_loss=own_loss).to(dtype)
    x, target = _batch(0, 2)
    return BuiltModel(
        module=module,
        args=(x.to(dtype),),
        kwargs={"target": target} if own_loss else {},
        loss=None if own_loss else _mean,
    )


def _batches(built: BuiltModel) -> list[tuple[Any, Any]]:
    made = [_batch(seed) for seed in range(3)]
    return [built.as_call((x.to(built.args[0].dtype), target)) for x, target in made]


@pytest.mark.parametrize(
    ("options", "compared"),
    [
        ({}, "whole"),
        ({"own_loss": True}, "whole"),
        ({"dropout": 0.3}, "outputs"),
        ({"norm": True}, "outputs"),
        ({"dropout": 0.3, "own_loss": True}, "microbatches"),
        ({"norm": True, "own_loss": True}, "microbatches"),
        ({"dtype": torch.bfloat16}, "microbatches"),
    ],
)
def test_how_one_process_computes(options: dict[str, Any], compared: str) -> None:
    """Two that train alone agree; that one is compared with the whole shows in the gradient of plain torch."""
    built = _built(**options)
    found, losses = [], []

    def keep(_: int, loss: float) -> None:
        losses.append(loss)
        found.append(gradients(built.module.named_parameters()))

    batches = _batches(built)
    optimizer = torch.optim.Adam(built.module.parameters(), lr=0.01)
    train_alone(built, batches, sizes=SIZES, optimizer=optimizer, before_update=keep)
    again = _built(**options)
    check = compare_gradients(
        again,
        batches,
        sizes=SIZES,
        optimizer=torch.optim.Adam(again.module.parameters(), lr=0.01),
        found=found,
        losses=losses,
    )
    assert check.compared == compared
    assert check.passed, check
    if compared == "whole":
        plain = _built(**options)
        x, target = _batch(0)
        loss = plain.module(x, target=target) if plain.loss is None else _mean(plain.module(x), target)
        loss.backward()
        assert losses[0] == pytest.approx(loss.item(), rel=1e-14)
        for name, parameter in plain.module.named_parameters():
            torch.testing.assert_close(found[0][name], parameter.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"own_loss": True}, {"dropout": 0.3}, {"norm": True}])
def test_micro_batches_that_are_averaged_alike_are_seen(options: dict[str, Any]) -> None:
    """What a run would find that takes a mean over tokens for one over samples."""
    built = _built(**options)
    batch = _batches(built)[0]
    x, target = _batch(0)
    losses = []
    for inputs, own in zip(x.split(SIZES), target.split(SIZES), strict=True):
        output = built.module(inputs, target=own) if built.loss is None else built.module(inputs)
        loss = (output if built.loss is None else _mean(output, own)) / len(SIZES)
        loss.backward()
        losses.append(loss.item())
    check = compare_gradients(
        _built(**options),
        [batch],
        sizes=SIZES,
        optimizer=None,
        found=[gradients(built.module.named_parameters())],
        losses=[sum(losses)],
    )
    assert not check.passed
    assert check.gradient_difference > 0.01


def test_wrong_weights_show_where_only_micro_batches_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and an own loss: the run's weights are used, but evaluation tells whether they are right."""
    import bapipe.torch.verify.gradient_check as module
    from bapipe.torch.stage.loss_weighing import Weighing

    def blind(loss: Any, _: Any, **options: Any) -> Weighing:
        return Weighing(loss, None, **options)  # knows nothing of the graph: a mean over samples

    options: dict[str, Any] = {"dropout": 0.3, "own_loss": True}

    def differ() -> float:
        built = _built(**options)
        alone = train_alone(built, _batches(built), sizes=SIZES, optimizer=None, before_update=lambda *_: None)
        return alone.misweighed

    assert differ() <= 1e-12
    monkeypatch.setattr(module, "Weighing", blind)
    assert differ() > 1e-3


def test_nothing_to_learn_from_is_no_difference() -> None:
    """Without a single label the loss is no number in one process, and the gradients are 0."""
    built = _built()
    x, target = _batch(0)
    zeros = {name: torch.zeros_like(item) for name, item in built.module.named_parameters()}
    check = compare_gradients(
        built,
        [(x, torch.full_like(target, IGNORED))],
        sizes=SIZES,
        optimizer=None,
        found=[zeros],
        losses=[float("nan")],
    )
    assert check.passed

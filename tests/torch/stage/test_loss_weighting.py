"""How losses join: what is recognised is exact, in value and gradient; what is not is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="losses are torch's: pip install bapipe[torch]")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.torch import token_mean  # noqa: E402
from bapipe.torch.capturing import capture  # noqa: E402
from bapipe.torch.capturing.loss_graph import own_loss  # noqa: E402
from bapipe.torch.stage.loss import LossOfEach, LossSum, loss_of_step  # noqa: E402
from bapipe.torch.stage.loss_watch import LossWatch  # noqa: E402
from bapipe.torch.stage.loss_weighing import Weighing  # noqa: E402

SIZES = (3, 2, 2, 1)
CLASSES, LENGTH, IGNORED = 5, 6, -100
Loss = Callable[[Tensor, Tensor], Any]


def logits() -> Tensor:
    return torch.randn(
        sum(SIZES), LENGTH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()


def labels() -> Tensor:
    """Of each sample another number; of samples 3 and 4, a micro-batch of their own, none."""
    found = torch.randint(CLASSES, (sum(SIZES), LENGTH), generator=torch.Generator().manual_seed(1))
    for sample, length in enumerate((6, 2, 5, 0, 0, 1, 3, 4)):
        found[sample, length:] = IGNORED
    return found


def values() -> Tensor:
    """Numbers, of which samples 3 and 4 have none above 0."""
    found = torch.randn(
        sum(SIZES), LENGTH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    found[3:5] = -found[3:5].abs()
    return found


WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
PENALISED = torch.full((3,), 0.3, dtype=torch.float64)


def _flat(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _weighted(output: Tensor, target: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)(output.transpose(1, 2), target)


def _other_index(output: Tensor, target: Tensor) -> Tensor:
    target = target.masked_fill(target == IGNORED, 2)
    return nn.CrossEntropyLoss(ignore_index=2)(output.transpose(1, 2), target)


def _picture(output: Tensor, target: Tensor) -> Tensor:
    """Segmentation: a label for every place of two dimensions."""
    shape = (len(output), CLASSES, 2, LENGTH // 2)
    return functional.cross_entropy(output.transpose(1, 2).reshape(shape), target.reshape(len(output), 2, -1))


def _nll(output: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(functional.log_softmax(output, -1).transpose(1, 2), target)


def _scaled(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * _flat(output, target).double() / 3 + 0.1 * PENALISED.square().sum()


def _twice(output: Tensor, target: Tensor) -> Tensor:
    first = functional.cross_entropy(output.transpose(1, 2), target)
    return first + 0.3 * functional.cross_entropy(2 * output.transpose(1, 2), target)


def _masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != IGNORED).to(output.dtype)
    each = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (each * mask).sum() / mask.sum()


def _gathered(output: Tensor, target: Tensor) -> Tensor:
    mask = target != IGNORED
    found = functional.log_softmax(output, -1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    return -(found * mask).sum() / mask.sum().clamp(min=1)


def _skipping(output: Tensor, target: Tensor) -> Tensor:
    """A branch on the data, as many write it to keep from 0/0."""
    if not (target != IGNORED).any():
        return output.sum() * 0
    return _flat(output, target)


COUNTED: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "cross entropy": (_flat, labels),
    "class weights and smoothing": (_weighted, labels),
    "another ignored label": (_other_index, labels),
    "segmentation": (_picture, labels),
    "nll_loss": (_nll, labels),
    "scaled, and a penalty": (_scaled, labels),
    "two over the same labels": (_twice, labels),
    "a mask by hand": (_masked, labels),
    "a mask by hand, clamped": (_gathered, labels),
    "a branch that skips": (_skipping, labels),
    "picked by a mask": (lambda o, t: functional.cross_entropy(o[t != IGNORED], t[t != IGNORED]), labels),
    "errors picked by a mask": (lambda o, t: functional.mse_loss(o[t > 0], t[t > 0]), values),
    "a mean of what is picked": (lambda o, t: (o - t)[t > 0].mean(), values),
    "by a number that was read": (lambda o, t: (o - t)[t > 0].sum() / max((t > 0).sum().item(), 1), values),
}
MEANS: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "mse_loss": (functional.mse_loss, values),
    "BCE": (lambda o, t: functional.binary_cross_entropy_with_logits(o, t.sigmoid()), values),
    "class probabilities": (lambda o, t: functional.cross_entropy(o.transpose(1, 2), t.softmax(-1).mT), values),
    "several": (lambda o, t: functional.mse_loss(o, t) + 0.1 * functional.l1_loss(o, t) + o.abs().mean(), values),
    "sum over samples": (lambda o, t: (o - t).square().sum() / o.shape[0], values),
    "sum over entries": (lambda o, t: (o - t).square().sum() / o.numel(), values),
    "of means per sample": (lambda o, t: ((o - t).sum((1, 2)) / (t > -1).sum((1, 2))).mean(), values),
    "over the first dimension": (lambda o, t: (o - t).square().mean(0).sum(), values),
    "KL divergence": (
        lambda o, t: 4 * functional.kl_div((o / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean"),
        values,
    ),
    "a list": (lambda o, t: sum(functional.mse_loss(o[:, i], t[:, i]) for i in range(3)) / 3, values),
    "a stack": (lambda o, t: torch.stack([functional.mse_loss(o[:, i], t[:, i]) for i in (0, 1)]).mean(), values),
}
SUMS: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "reduction": (lambda o, t: functional.mse_loss(o, t, reduction="sum"), values),
    "over a constant": (lambda o, t: (o - t).square().sum() / 100.0, values),
    "labels": (lambda o, t: 0.1 * functional.cross_entropy(o.mT, t, reduction="sum"), labels),
}
UNKNOWN: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "cross entropy and another mean": (lambda o, t: _flat(o, t) + 0.3 * o.square().mean(), labels),
    "a root": (lambda o, t: (o - t).square().mean().sqrt(), values),
    "a product of means": (lambda o, t: o.mean() * t.mean(), values),
    "all samples against each other": (
        lambda o, t: functional.cross_entropy(o[:, 0] @ t[:, 0].T, torch.arange(len(o))),
        values,
    ),
    "exp of logs": (lambda o, t: (o.exp().sum().log() - t.exp().sum().log()).exp(), values),
}
RECOGNISED = {
    f"{kind}: {name}": (kind, *case)
    for kind, cases in (("counted", COUNTED), ("mean", MEANS), ("sum", SUMS))
    for name, case in cases.items()
}


def kind_of(loss: Loss, output: Tensor, target: Tensor) -> str:
    with LossWatch(output, target, len(output)) as watch:
        found = loss(output, target)
    return watch.kind_of(found).name


@pytest.mark.parametrize("name", RECOGNISED)
def test_what_is_recognised_has_the_gradient_of_the_whole(name: str) -> None:
    """Also of a micro-batch in which nothing counts, and whose sizes differ."""
    kind, loss, make = RECOGNISED[name]
    target = make()
    whole = logits()
    expected = loss(whole, target)
    expected.backward()
    assert kind_of(loss, logits()[: SIZES[0]], target[: SIZES[0]]) == kind
    parts = logits()
    sums = LossSum(loss, SIZES)
    pairs = zip(parts.split(SIZES), target.split(SIZES), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, (output, own) in enumerate(pairs):
            sums.of(output, own, index, count=True).backward()
    totals = sums.sums()
    divisor = totals.divisor()
    assert (divisor is None) == (kind != "counted")
    assert totals.loss / (divisor or 1) == pytest.approx(expected.item(), rel=1e-12)
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad / (divisor or 1), whole.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_recognised_warns_once_and_weighs_by_samples(name: str) -> None:
    loss, make = UNKNOWN[name]
    output, target = logits(), make()
    sums = LossSum(loss, SIZES)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pairs = zip(output.split(SIZES), target.split(SIZES), strict=True)
        found = [sums.of(part, own, index, count=True) for index, (part, own) in enumerate(pairs)]
    assert len(said) == 1
    assert str(said[0].message) == (
        "it is not known over what the loss is a mean, so micro-batches weigh by their samples; "
        "return (sum, count) from it, or wrap it in bapipe.torch.token_mean"
    )
    first = loss(logits()[: SIZES[0]], target[: SIZES[0]])
    assert found[0].item() == pytest.approx(first.item() * SIZES[0] / sum(SIZES))
    assert sums.sums().divisor() is None


def test_other_ranks_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = LossSum(Weighing(UNKNOWN["a root"][0], warns=False), SIZES)
        sums.of(logits()[:3], values()[:3], 0, count=True)


def test_a_function_that_is_no_mean_over_a_count_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watching costs a few microseconds for every torch function of the loss."""
    made = []
    before = LossWatch.__init__

    def counting(self: LossWatch, *args: Any) -> None:
        made.append(1)
        before(self, *args)

    monkeypatch.setattr(LossWatch, "__init__", counting)
    for loss, target, times in ((functional.mse_loss, values(), 1), (_flat, labels(), len(SIZES))):
        made.clear()
        sums = LossSum(loss, SIZES)
        for index, (output, own) in enumerate(zip(logits().split(SIZES), target.split(SIZES), strict=True)):
            sums.of(output, own, index, count=True)
        assert len(made) == times


def test_a_count_can_be_said() -> None:
    loss = token_mean(UNKNOWN["exp of logs"][0], count=lambda _, target: (target > 0).sum())
    output, target = logits(), values()
    sums = LossSum(loss, SIZES)
    whole = 0.0
    for index, (part, own) in enumerate(zip(output.split(SIZES), target.split(SIZES), strict=True)):
        sums.of(part, own, index, count=True)
        whole += float(UNKNOWN["exp of logs"][0](part, own).detach()) * int((own > 0).sum())
    totals = sums.sums()
    assert totals.loss / totals.weight == pytest.approx(whole / int((target > 0).sum()))
    empty, count = token_mean(_flat, count=lambda *_: 0)(logits(), labels())
    assert (empty.item(), count) == (0.0, 0)
    all_ignored = torch.full_like(labels(), IGNORED)
    output = logits()
    total, _ = token_mean(_flat, count=lambda _, target: (target != IGNORED).sum())(output, all_ignored)
    total.backward()
    assert output.grad is not None
    assert (total.item(), output.grad.abs().max().item()) == (0.0, 0.0)


def test_a_loss_that_changes_its_mind_is_refused() -> None:
    seen = []

    def fickle(output: Tensor, target: Tensor) -> Tensor:
        seen.append(1)
        return _flat(output, target) if len(seen) % 2 else functional.mse_loss(output, torch.zeros_like(output))

    sums = LossSum(fickle, SIZES)
    for index, (output, target) in enumerate(zip(logits().split(SIZES), labels().split(SIZES), strict=True)):
        sums.of(output, target, index, count=True)
    with pytest.raises(BaPipeError, match="a mean over a count in some micro-batches only; return"):
        sums.sums().divisor()


def test_each_micro_batch_by_itself() -> None:
    """PipeDream: its own mean, 0 where nothing counts; the loss of the step is that of all labels."""
    each = LossOfEach(_flat)
    output, target = logits(), labels()
    for size, part, own in zip(SIZES, output.split(SIZES), target.split(SIZES), strict=True):
        each.of_size(size).of(part, own, 0, count=True).backward()
    found = each.taken()
    assert [weight for _, weight in found] == [13, 0, 4, 4]
    assert found[1][0] == 0.0
    assert output.grad is not None
    assert output.grad.isfinite().all()
    assert loss_of_step(*zip(*found, strict=True)) == pytest.approx(_flat(logits(), target).item(), rel=1e-12)
    assert loss_of_step([1.0, 2.0], [3.0, 1.0]) == 1.25
    assert loss_of_step([1.0, 2.0], [0.0, 0.0]) == 3.0  # sums


class OwnLoss(nn.Module):
    """Returns its loss, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.how = how

    def forward(self, x: Tensor, target: Tensor, items: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output = self.head(torch.tanh(self.first(x)))
        flat, wanted = output.flatten(0, 1), target.flatten()
        loss = functional.cross_entropy(flat, wanted, reduction="mean" if items is None else "sum")
        mask = (target != IGNORED).to(output.dtype)
        if items is not None:
            loss = loss / items
        elif self.how == "scaled":
            loss = 0.5 * loss + self.head.weight.square().sum()
        elif self.how == "mask":
            loss = (output.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)
        elif self.how == "squares":
            loss = output.square().mean() + functional.mse_loss(output, torch.zeros_like(output))
        elif self.how == "per sample":
            loss = output.square().sum() / output.shape[0]
        elif self.how == "sum":
            loss = output.square().sum()
        elif self.how == "and squares":
            loss = loss + output.square().mean()
        elif self.how == "root":
            loss = loss.sqrt()
        elif self.how == "nll":
            loss = functional.nll_loss(flat.log_softmax(-1), wanted)
        return loss, output


@pytest.mark.parametrize(
    ("how", "kind", "positions"),
    [
        ("plain", "counted", LENGTH),
        ("scaled", "counted", LENGTH),
        ("nll", "counted", LENGTH),
        ("mask", "counted", 1),
        ("items", "sum", 1),
        ("sum", "sum", 1),
        ("squares", "mean", 1),
        ("per sample", "mean", 1),
        ("and squares", "unknown", 1),
        ("root", "unknown", 1),
    ],
)
def test_the_models_own_loss_is_recognised(how: str, kind: str, positions: float) -> None:
    args = (torch.randn(3, LENGTH, 4), labels()[:3])
    if how == "items":
        args = (*args, torch.tensor(9.0))
    captured = capture(OwnLoss(how), args, check=False)
    found = own_loss(captured.program)
    assert found is not None
    assert (found.leaf, found.kind) == (0, kind)
    if kind == "counted":
        assert found.positions == positions
    stage = captured.stage(0, len(captured.layers) - 1, count_loss=True)
    assert stage.stage_spec.counts_loss == (kind == "counted")
    if kind == "counted":
        roots = [captured.input_leaves(args)[root.index] for root in stage.stage_spec.roots]
        loss, _, count = stage(*roots)
        assert int(count) == int((args[1] != IGNORED).sum())
        torch.testing.assert_close(loss, captured.module(*args)[0])
        roots = [torch.full_like(leaf, IGNORED) if leaf.dtype == torch.int64 else leaf for leaf in roots]
        loss, _, count = stage(*roots)
        assert int(count) == 0
        torch.autograd.backward(loss)
        assert all(item.grad is None or bool(item.grad.isfinite().all()) for item in stage.parameters())


def test_a_model_whose_own_loss_is_not_known_warns_once() -> None:
    captured = capture(OwnLoss("root"), (torch.randn(3, LENGTH, 4), labels()[:3]), check=False)
    weighing = Weighing(None, own_loss(captured.program))
    with pytest.warns(UserWarning, match=r"over what the model's loss is a mean.*give a loss_fn that returns"):
        found = weighing((torch.ones(()),), None, 3)
    assert found.kind == "mean"
    weighing((torch.ones(()),), None, 3)  # a second warning would be an error


def test_a_loss_function_may_use_the_loss_that_the_model_returns() -> None:
    captured = capture(OwnLoss("plain"), (torch.randn(3, LENGTH, 4), labels()[:3]), check=False)
    weighing = Weighing(lambda output, _: 2 * output[0], own_loss(captured.program))
    found = weighing((torch.tensor(1.5), torch.zeros(3, 2)), None, 3, torch.tensor(7))
    assert (found.kind, float(found.loss), int(found.count)) == ("counted", 3.0, 7)


def test_a_loss_that_cannot_take_what_the_model_returns_is_refused_with_what_to_do() -> None:
    output = (logits().transpose(1, 2), logits())
    said = r"cannot take what the model returns, a tuple \(.*; let it take the part that it needs, such as output"
    for _ in range(2):  # watched and settled
        with pytest.raises(BaPipeError, match=said):
            Weighing(functional.cross_entropy)(output, labels(), sum(SIZES))
    with pytest.raises(BaPipeError, match="a function `loss` beside the model's"):
        Weighing(None)(logits(), None, sum(SIZES))


def test_a_mistake_within_a_loss_of_one_tensor_stays_what_it_is() -> None:
    def mistaken(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
        return output.no_such_method()  # type: ignore[no-any-return, operator]

    with pytest.raises(AttributeError, match="no_such_method"):
        Weighing(mistaken)(logits(), labels(), sum(SIZES))

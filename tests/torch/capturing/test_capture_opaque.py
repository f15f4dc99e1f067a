"""What export gets wrong without saying so is seen, and the module kept whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import capture_models as models
from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture, fill_stage, largest_difference, run_eager, run_stages

CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "custom function": (lambda: models.Around(models.Quantised()), "autograd.Function StraightThrough"),
    "python randomness": (lambda: models.Around(models.PythonLayerdrop()), "randomness of Python or numpy"),
    "checkpoint": (lambda: models.Around(models.Residual(), reentrant=False), "activation checkpointing"),
    "reentrant checkpoint": (lambda: models.Around(models.Residual(), reentrant=True), "activation checkpointing"),
    "checkpoints itself": (lambda: models.Around(models.SelfCheckpointed()), "activation checkpointing"),
    "branch on data": (lambda: models.Around(models.Branching()), "data-dependent"),
    "packed lstm": (lambda: models.Around(models.PackedLstm()), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_whole_and_exact(name: str) -> None:
    torch.manual_seed(0)
    make, reason = CASES[name]
    module, args = make().double(), (models.sample(),)
    captured = capture(module, args)
    assert [finding.path for finding in captured.opaque] == ["middle"]
    assert reason in captured.opaque[0].reason
    assert "'middle' is kept as a leaf module" in captured.notes[0]
    assert [layer.name for layer in captured.layers] == ["before", "middle", "after", "head"]
    assert captured.layers[1].kind == "opaque"
    assert captured.layers[1].parameters == tuple(f"middle.{name}" for name, _ in module.middle.named_parameters())
    for batch in (4, 3):
        others = (models.sample(batch),)
        for cut in (1, 2, 3):
            random.seed(0)
            expected = run_eager(module, others)
            random.seed(0)
            difference, what = largest_difference(run_stages(captured, [cut], others, isolate=True), expected)
            assert difference <= 1e-12, what
    assert set(captured.stage(1, 1).state_dict()) == {f"middle.{name}" for name in module.middle.state_dict()}


def test_python_randomness_is_seeded_with_the_rest() -> None:
    module, args = models.Around(models.PythonLayerdrop()).double(), (models.sample(),)
    captured = capture(module, args)
    whole = [run_stages(captured, [], args, position=(0, step)).loss for step in range(8)]
    assert len({float(loss) for loss in whole}) == 8
    for step in range(8):
        random.seed(step)
        assert torch.equal(run_stages(captured, [1, 2], args, position=(0, step)).loss, whole[step])


def test_the_rest_of_a_model_stays_fine_grained() -> None:
    inner = nn.Sequential(models.Residual(), models.Quantised(), models.Residual())
    captured = capture(models.Around(inner).double(), (models.sample(),))
    assert [layer.name for layer in captured.layers] == [
        "before", "middle.0", "middle.1", "middle.2", "after", "head"
    ]  # fmt: skip
    assert [finding.path for finding in captured.opaque] == ["middle.1"]


def test_only_the_blocks_that_are_checkpointed_are_kept_whole() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([models.Residual() for _ in range(3)])

        def forward(self, value: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                value = (
                    torch.utils.checkpoint.checkpoint(block, value, use_reentrant=False) if index else block(value)
                )
            return value.pow(2).mean()

    captured = capture(Stack().double(), (models.sample(),))
    assert [finding.path for finding in captured.opaque] == ["blocks.1", "blocks.2"]
    index = [layer.name for layer in captured.layers].index("blocks.1")
    stage = captured.stage(index, index)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda item: item
    ):
        stage(models.sample().requires_grad_())
    assert len(saved) == 1
    assert torch.equal(saved[0], models.sample()), "the stage still checkpoints: autograd keeps its input alone"


def test_a_function_in_the_model_itself_is_refused_by_name() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models.linear()

        def forward(self, value: Tensor) -> Tensor:
            return models.straight_through(self.inner(value)).sum()

    with pytest.raises(
        BaPipeError, match=r"autograd.Function StraightThrough, in the forward of Root, .*submodule"
    ):
        capture(Root(), (torch.randn(2, models.WIDTH),))


def test_a_wrong_gradient_is_noticed_even_if_nothing_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapipe.torch.capturing.trace_hazards.function_classes", list)
    with pytest.raises(BaPipeError, match=r"differs from eager: the gradient of .* in layer 'middle'"):
        capture(models.Around(models.Quantised()).double(), (models.sample(),))


def test_nothing_stays_patched() -> None:
    forward, enter = models.StraightThrough.forward, torch.autograd.graph.saved_tensors_hooks.__enter__
    module = models.Around(models.Quantised())
    capture(module, (torch.randn(2, models.WIDTH),))
    assert models.StraightThrough.forward is forward
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is enter
    assert "forward" not in vars(module)
    assert "forward" not in vars(module.middle)
    assert torch.is_grad_enabled()


def test_layer_drop_is_off_and_said_so() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([models.Residual() for _ in range(2)])

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                if torch.rand([]) < 0.5:
                    continue
                value = block(value)
            return value.pow(2).mean()

    captured = capture(Dropping().double(), (models.sample(),))
    assert captured.notes == ("layer drop is off: 2 draws of torch.rand([]) are answered with 1",)
    assert not captured.opaque
    assert captured.checked == 0.0


def test_layer_drop_is_off_in_a_module_kept_whole() -> None:
    """What it would draw for that is not drawn, so that dropout behind it draws the same numbers as in eager."""

    class Dropping(models.Branching):
        def forward(self, value: Tensor) -> Tensor:
            if self.training and torch.rand([]) < 0.9:
                return value
            return nn.functional.dropout(super().forward(value), 0.3, self.training)

    module, args = models.Around(Dropping()).double(), (models.sample(),)
    captured = capture(module, args)
    assert [finding.path for finding in captured.opaque] == ["middle"]
    assert captured.checked == 0.0
    assert run_stages(captured, [1, 2], args).loss == run_eager(module, args).loss


class Tied(nn.Module):
    """A table of words that is shared with one inside a module that is kept whole, and with the head."""

    class Encoder(nn.Module):
        def __init__(self, words: nn.Embedding) -> None:
            super().__init__()
            self.words = nn.Embedding(*words.weight.shape)
            self.words.weight = words.weight

        def forward(self, words: Tensor) -> Tensor:
            value: Tensor = self.words(words)
            return value if value.sum() > 0 else -value

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, models.WIDTH)
        self.encoder = Tied.Encoder(self.shared)
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)
        self.head = nn.Linear(models.WIDTH, 10, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.inner(self.encoder(words)))
        return found.pow(2).mean()


def test_a_weight_shared_with_a_module_kept_whole_has_one_name_on_every_stage() -> None:
    torch.manual_seed(0)
    module, args = Tied().double(), (torch.arange(8).reshape(4, 2),)
    captured = capture(module, args)
    assert [finding.path for finding in captured.opaque] == ["encoder"]
    expected = run_eager(module, args)
    for cut in range(1, len(captured.layers)):
        difference, what = largest_difference(run_stages(captured, [cut], args, isolate=True), expected)
        assert difference <= 1e-12, what
    first = captured.stage(0, 0)
    assert [name for name, _ in first.named_parameters()] == ["shared.weight"]
    filled = fill_stage(first, {"shared.weight": torch.ones_like(module.shared.weight)})
    assert [name for name, _ in filled.named_parameters()] == ["shared.weight"]
    assert filled.get_parameter("encoder.words.weight") is filled.get_parameter("shared.weight")
    assert filled.get_parameter("shared.weight").eq(1).all()

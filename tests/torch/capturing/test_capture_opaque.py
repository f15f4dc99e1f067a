"""What export gets wrong without saying so is seen, and the module kept whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import capture_models as models
from bapipe.errors import BaPipeError
from bapipe.torch.capturing import capture, largest_difference, run_eager, run_stages

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

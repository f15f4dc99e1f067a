"""Where a loss or gradient that is not finite comes from: step, rank, stage and layer. All ranks look together.

Nobody looks while training goes well: the loss is on the host anyway, and the norm of the gradients where they are
clipped. Only when one of them is not finite the weights, the forward once more, and the gradients are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from bapipe.records.plan import Plan
from bapipe.torch.capturing import Captured
from bapipe.torch.comm import guarded
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.stage.forward_watch import NotFinite, first_value

__all__ = ["LayerWeights", "NonFinite", "NonFiniteSearch", "layer_weights"]

What = Literal["weights", "output", "gradient", "loss"]
_HERE: tuple[tuple[What, bool], ...] = (("gradient", True), ("weights", False))
LayerWeights = Mapping[int, Sequence[tuple[str, tuple[str, ...]]]]
"""stage -> its layers in order, each with the names of its parameters"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Where training first met a number that is not finite."""

    step: int
    """global batches that were trained before"""
    loss: float | None
    """of that step; None: it was finite, the gradients were not"""
    what: What
    """`weights`: an earlier optimizer step had gradients that were not finite, or was too large; `output`: of a
    layer, in the forward; `gradient`: of a layer's weights; `loss`: no layer, but the loss"""
    value: str
    """nan, inf or -inf"""
    rank: int | None
    """None: it is the loss"""
    stage: int | None
    layer: str | None
    """the first such layer: in the forward of an output, in the backward of weights and gradients"""
    place: str = ""
    """file:line of the model's code, where it is known"""

    @property
    def line(self) -> str:
        """All of it on one line."""
        start = f"step {self.step}: the gradients are not finite"
        if self.loss is not None:
            start = f"step {self.step}: the loss is {self.loss}"
        if self.layer is None:
            return f"{start}, and no layer's output is not finite; look at the loss function and its targets"
        where = f"layer '{self.layer}' on rank {self.rank}, stage {self.stage}"
        if self.what == "weights":
            since = "after the optimizer step before" if self.step else "before the first step"
            return f"{start}; the first weights in the backward that are {self.value}, {since}, are of {where}"
        at = f", at {self.place}" if self.place else ""
        if self.what == "output":
            return f"{start}; the first output that is {self.value} is of {where}{at}"
        return f"{start}; the first gradient in the backward that is {self.value} is of {where}"


def layer_weights(captured: Captured, plan: Plan, stages: Sequence[int]) -> LayerWeights:
    """The layers of a rank's stages, to look for the one that a gradient belongs to."""
    return {
        index: tuple(
            (layer.name, layer.parameters)
            for layer in captured.layers[plan.stages[index].first_layer : plan.stages[index].last_layer + 1]
        )
        for index in stages
    }


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one rank has found."""

    rank: int
    stage: int
    layer: str
    value: str
    place: str = ""


class NonFiniteSearch:
    """Looks for what is not finite on all ranks; each method is called by all of them in the same order."""

    def __init__(self, rank: int, watch: Watch, weights: LayerWeights, modules: Mapping[int, nn.Module]) -> None:
        """`modules` are this rank's stages."""
        self._rank, self._watch, self._weights, self._modules = rank, watch, weights, modules
        self.gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad
        """what this rank has of a weight's gradient"""

    def look(
        self, step: int, loss: float | None, replay: Callable[[], Mapping[int, NotFinite]] | None
    ) -> NonFinite:
        """What is not finite after the backward of a step. `replay` runs its forward again and returns what it
        found on this rank's stages; None: the forward was finite."""
        # The first in the backward is on the last stage, the first in the forward on the first.
        found = self._everywhere(self.in_weights(gradients=False))
        if found:
            return _described(step, loss, "weights", max(found, key=_stage))
        found = self._everywhere(self._outputs(replay))
        if found:
            return _described(step, loss, "output", min(found, key=_stage))
        found = self._everywhere(self.in_weights(gradients=True))
        if found:
            return _described(step, loss, "gradient", max(found, key=_stage))
        return NonFinite(step=step, loss=loss, what="loss", value=str(loss), rank=None, stage=None, layer=None)

    def look_here(self, step: int, loss: float) -> NonFinite:
        """The same of this rank alone, after an optimizer step that was taken already: by gradients first."""
        for what, gradients in _HERE:
            found = self.in_weights(gradients=gradients)
            if found is not None:
                return _described(step, loss, what, found)
        return NonFinite(step=step, loss=loss, what="loss", value=str(loss), rank=None, stage=None, layer=None)

    def in_weights(self, *, gradients: bool) -> _Finding | None:
        """The first layer of this rank, in the order of the backward, with weights or gradients that are not."""
        for stage in sorted(self._modules, reverse=True):
            own = dict(self._modules[stage].named_parameters())
            for layer, names in reversed(self._weights[stage]):
                tensors = [own[name] for name in names if name in own]
                value = first_value([self.gradient(item) for item in tensors] if gradients else tensors)
                if value is not None:
                    return _Finding(self._rank, stage, layer, value)
        return None

    def _outputs(self, replay: Callable[[], Mapping[int, NotFinite]] | None) -> _Finding | None:
        if replay is None:
            return None
        found = replay()
        if not found:
            return None
        stage = min(found)
        return _Finding(self._rank, stage, found[stage].layer, found[stage].value, found[stage].place)

    def _everywhere(self, own: _Finding | None) -> list[_Finding]:
        everywhere: list[_Finding | None] = [None] * dist.get_world_size()
        with self._watch.meeting("looking for what is not finite"), guarded(None):
            dist.all_gather_object(everywhere, own)
        return [finding for finding in everywhere if finding is not None]


def _stage(finding: _Finding) -> int:
    return finding.stage


def _described(step: int, loss: float | None, what: What, finding: _Finding) -> NonFinite:
    return NonFinite(
        step=step,
        loss=loss,
        what=what,
        value=finding.value,
        rank=finding.rank,
        stage=finding.stage,
        layer=finding.layer,
        place=finding.place,
    )

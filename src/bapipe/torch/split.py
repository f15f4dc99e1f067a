"""Cut a module into the plan's stages. So far: an `nn.Sequential`, whose children are the layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.model import ModelRef
from bapipe.plan import PlanStage
from bapipe.torch.build import fingerprint

__all__ = ["TensorShape", "boundaries", "check_model", "layer_names", "overwrites_input", "stage_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def layer_names(module: nn.Module) -> tuple[str, ...]:
    """The layers of a module: its children, which run one after the other."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise BaPipeError(
            f"only an nn.Sequential can be cut into stages yet, got {type(module).__name__}; "
            "return one whose children are the layers"
        )
    return tuple(name for name, _ in module.named_children())


def check_model(module: nn.Module, model: ModelRef, stages: Sequence[PlanStage]) -> None:
    """Refuse a module that is not the one that was planned, by fingerprint and by the names of its layers."""
    names = layer_names(module)
    found = fingerprint(module, names)
    if model.fingerprint is not None and found != model.fingerprint:
        raise BaPipeError(
            f"'{model.ref}' builds a model with fingerprint {found}, but the plan is of {model.fingerprint}: "
            "its layers or parameters have changed; profile and plan it again"
        )
    planned = tuple(name for stage in stages for name in stage.layers)
    if planned != names:
        pairs = zip((*planned, "nothing"), (*names, "nothing"), strict=False)
        here, there = next((a, b) for a, b in pairs if a != b)
        raise BaPipeError(
            f"the plan has {len(planned)} layers and '{model.ref}' {len(names)}: where the plan has '{here}' the "
            f"model has '{there}'; profile and plan it again"
        )


def stage_module(module: nn.Module, stage: PlanStage) -> nn.Sequential:
    """The stage's children under the model's own names, so that its parameters keep theirs too."""
    children = list(module.named_children())
    own = children[stage.first_layer : stage.last_layer + 1]
    others = [*children[: stage.first_layer], *children[stage.last_layer + 1 :]]
    elsewhere = {id(parameter): name for name, child in others for parameter in child.parameters()}
    for name, child in own:
        for parameter in child.parameters():
            if id(parameter) in elsewhere:
                raise BaPipeError(
                    f"layers '{name}' and '{elsewhere[id(parameter)]}' share a parameter; "
                    "that cannot be cut yet: plan them on one stage"
                )
    return nn.Sequential(OrderedDict(own))


def overwrites_input(stage: nn.Module) -> bool:
    """Whether the first layer may write over its input, which autograd forbids where the input is received."""
    first = next(stage.children(), stage)
    return any(getattr(part, "inplace", False) for part in first.modules())


def boundaries(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, sizes: Iterable[int]
) -> dict[int, tuple[TensorShape, ...]]:
    """For each micro-batch size, what comes out of every layer.

    Found on the meta device: nothing is computed and no state of the module changes. The first dimension of the
    example counts samples.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].ndim == 0:
        raise BaPipeError(
            f"an nn.Sequential takes one tensor of samples, got {len(args)} args and {len(kwargs)} kwargs; "
            "return (module, (input,), {})"
        )
    example = args[0]
    found = {}
    for size in sorted(set(sizes)):
        value = torch.empty((size, *example.shape[1:]), dtype=example.dtype, device="meta")
        found[size] = tuple(_outputs(module, value))
    return found


def _outputs(module: nn.Module, value: Tensor) -> Iterable[TensorShape]:
    for name, child in module.named_children():
        state = {key: item.to("meta") for key, item in (*child.named_parameters(), *child.named_buffers())}
        try:
            with torch.no_grad():
                value = torch.func.functional_call(child, state, (value,))
        except Exception as error:
            line = (str(error).splitlines() or [""])[0][:200]
            raise BaPipeError(
                f"the output of layer '{name}' cannot be foretold: {line}; correct the layer"
            ) from error
        if not isinstance(value, Tensor):
            raise BaPipeError(
                f"layer '{name}' returns a {type(value).__name__}, and only one tensor can cross a cut yet; "
                "wrap the layer so that it returns one"
            )
        yield TensorShape(shape=tuple(value.shape), dtype=value.dtype)

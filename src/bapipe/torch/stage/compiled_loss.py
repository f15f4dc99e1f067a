"""A loss function compiled with its backward: of a language model it is as large as several layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.capturing.loss_graph import OwnLoss
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, FlatFunction
from bapipe.torch.stage.loss_weighing import Count, LossFunction, Weighed, Weighing

__all__ = ["CompiledWeighing"]


class CompiledWeighing(Weighing):
    """As `Weighing`; the loss function and its count run compiled where they can be."""

    def __init__(
        self,
        function: LossFunction | None,
        own: OwnLoss | None = None,
        *,
        warns: bool = True,
        programs: CompiledPrograms,
    ) -> None:
        super().__init__(function, own, warns=warns)
        self._compiles = function is not None and own is None
        self._programs = programs
        self._found: dict[Any, Weighed] = {}
        """what is not computed of a loss, by what it was given"""

    def __call__(self, output: Any, target: Any, size: int, tokens: Tensor | None = None) -> Weighed:
        if not self._compiles or not torch.is_grad_enabled():
            return super().__call__(output, target, size, tokens)
        leaves, spec = flatten((output, target))
        given = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = ("loss", id(self), size, repr(others), str(spec))
        about = (*key, *((item.shape, item.dtype) for item in given))

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            remaining = iter(tensors)
            tree = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own_output, own_target = unflatten(tree, spec)
            found = super(CompiledWeighing, self).__call__(own_output, own_target, size, tokens)
            counted = isinstance(found.count, Tensor)
            self._found[about] = replace(found, loss=torch.empty(0), count=-1 if counted else found.count)
            return (found.loss, found.count) if isinstance(found.count, Tensor) else (found.loss,)

        flags = [item.requires_grad for item in given]
        program = self._programs.of_function(key, "loss", FlatFunction(run=run, takes_gradient=flags), given)
        if program is None:
            self._compiles = False
            return super().__call__(output, target, size, tokens)
        made, known = program(given, None), self._found[about]
        count: Count = made[1] if len(made) > 1 else known.count
        return replace(known, loss=made[0], count=count)

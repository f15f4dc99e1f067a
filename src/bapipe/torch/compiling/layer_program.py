"""One compiled layer: forward, backward, and the backward in two parts, with the weights as inputs.

Layers of equal structure share one program. Autograd sees a program as one node, so its gradients join those of
eager layers, and weights get theirs as they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.compiling.backward_split import SplitGraphs, split_backward_graph
from bapipe.torch.compiling.inductor_internals import Backend, BackwardGraph, Boxed, CompiledJoint, lower
from bapipe.torch.device.gradient_layout import add_gradients

__all__ = ["BackwardKinds", "DeferredGradients", "LayerFunction", "LayerProgram", "compile_layer"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFunction:
    """What a layer computes, without side effects."""

    run: Callable[..., tuple[Tensor, ...]]
    """takes weights, then buffers and constants, then values, as flat arguments; returns outputs, then buffers"""
    arguments: int
    """how many it takes"""
    weights: int
    """how many of the arguments, the first ones, are parameters"""
    state: int
    """how many, the first ones, are parameters, buffers or constants"""
    outputs: int
    """how many of the results, the first ones, are outputs"""
    written: tuple[int, ...]
    """which of the arguments are buffers that the other results are to be copied into"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardKinds:
    """Which backwards are compiled."""

    whole: bool = True
    split: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Halves:
    graphs: SplitGraphs
    input_gradient: Boxed | None
    weight_gradient: Boxed | None


class DeferredGradients:
    """Weight gradients of one layer and one micro-batch that wait for their turn."""

    __slots__ = ("_halves", "_held", "_weights")

    def __init__(self, halves: _Halves, held: list[Tensor], weights: Sequence[Tensor]) -> None:
        self._halves = halves
        self._held = held
        self._weights = weights

    @property
    def held(self) -> tuple[Tensor, ...]:
        """What is held for them."""
        return tuple(self._held)

    @torch.no_grad()
    def run(self) -> None:
        """Into the weights' `.grad`; what was held is let go."""
        half = self._halves.weight_gradient
        if half is None:
            return
        held, self._held = self._held, []
        add_gradients([self._weights[index] for index in self._halves.graphs.deferred], half(held))


class LayerProgram:
    """The compiled graphs of one structure, for inputs of one set of shapes and dtypes."""

    def __init__(
        self,
        function: LayerFunction,
        lowered: CompiledJoint,
        differentiable: Sequence[bool],
    ) -> None:
        """`differentiable`: which outputs have a gradient."""
        self._function = function
        self._forward = lowered.forward
        self._results = lowered.results
        compiled: tuple[Boxed | None, _Halves | None] = lowered.backward or (None, None)
        self._backward, self._halves = compiled
        self._tangents = [(item.shape, item.stride(), item.dtype, item.device) for item in lowered.tangents]
        self.differentiable = tuple(differentiable)

    def __call__(
        self, arguments: Sequence[Tensor], deferred: list[DeferredGradients] | None
    ) -> tuple[Tensor, ...]:
        """The outputs. With a list for `deferred`, the backward computes input gradients and leaves the rest
        there."""
        if torch.is_grad_enabled() and self._tangents:
            found: tuple[Tensor, ...] = _Differentiable.apply(self, deferred, *arguments)  # type: ignore[no-untyped-call]
            return found
        with torch.no_grad():
            return self.run(arguments)[0]

    def run(self, arguments: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs, and what is saved for the backward; buffers are written."""
        results = self._forward(list(arguments))
        outputs, saved = results[: self._function.outputs], list(results[self._results :])
        for index, value in zip(
            self._function.written, results[self._function.outputs : self._results], strict=True
        ):
            buffer = arguments[index]
            saved = [item.clone() if item is buffer else item for item in saved]
            buffer.copy_(value)
        return tuple(outputs), saved

    def backward(
        self,
        saved: list[Tensor],
        gradients: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        deferred: list[DeferredGradients] | None,
    ) -> tuple[Tensor | None, ...]:
        """A gradient for each argument that has one; None for those that are deferred."""
        wanted = [item for item, has in zip(gradients, self.differentiable, strict=True) if has]
        given = [*saved, *map(_laid_out, wanted, self._tangents)]
        del wanted
        saved.clear()
        halves = self._halves
        if deferred is None or halves is None:
            assert self._backward is not None
            return tuple(self._backward(given))
        graphs = halves.graphs
        held = [given[index] for index in graphs.kept]
        found: list[Tensor | None] = [None] * self._function.arguments
        if halves.input_gradient is not None:
            results = halves.input_gradient(given)
            for index, gradient in zip(graphs.at_once, results[: len(graphs.at_once)], strict=True):
                found[index] = gradient
            held += results[len(graphs.at_once) :]
        if graphs.deferred:
            deferred.append(DeferredGradients(halves, held, weights))
        return tuple(found)

    @property
    def weights(self) -> int:
        """How many of its arguments, the first ones, are parameters."""
        return self._function.weights


def _laid_out(gradient: Tensor | None, about: tuple[Any, ...]) -> Tensor:
    """A gradient of an output as the backward was compiled for; zeros where none has come."""
    shape, stride, dtype, device = about
    if gradient is not None and gradient.stride() == stride and gradient.dtype == dtype:
        return gradient
    laid = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return laid.zero_() if gradient is None else laid.copy_(gradient)


class _Differentiable(torch.autograd.Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(
        ctx: Any, program: LayerProgram, deferred: list[DeferredGradients] | None, *arguments: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, saved = program.run(arguments)
        ctx.save_for_backward(*saved)
        ctx.program, ctx.deferred = program, deferred
        ctx.weights = arguments[: program.weights] if deferred is not None else ()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(item for item, has in zip(outputs, program.differentiable, strict=True) if not has)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        return (None, None, *ctx.program.backward(saved, gradients, ctx.weights, ctx.deferred))


def compile_layer(
    function: LayerFunction,
    examples: Sequence[Tensor],
    differentiable: Sequence[bool],
    kinds: BackwardKinds,
    *,
    backend: Backend = "inductor",
) -> LayerProgram:
    """Compile a layer for inputs like the examples: its forward, and its backward in one or both ways.

    Raises whatever the tracer or the compiler raises.
    """

    def compile_backward(graph: BackwardGraph) -> tuple[Boxed | None, _Halves | None]:
        halves = None
        if kinds.split:
            resident = {
                node.name
                for node in graph.module.graph.nodes
                if node.op == "placeholder" and _is_state(node.name, function.state)
            }
            parts = split_backward_graph(graph.module, graph.examples, weights=function.weights, resident=resident)
            halves = _Halves(
                graphs=parts,
                input_gradient=None
                if parts.input_graph is None
                else graph.compile(parts.input_graph, graph.examples),
                weight_gradient=None
                if parts.weight_graph is None
                else graph.compile(parts.weight_graph, parts.weight_examples),
            )
        return graph.compile(graph.module, graph.examples) if kinds.whole else None, halves

    lowered = lower(
        function.run,
        examples,
        results=function.outputs + len(function.written),
        on_backward=compile_backward,
        backend=backend,
    )
    return LayerProgram(function, lowered, differentiable)


def _is_state(name: str, state: int) -> bool:
    """Whether a saved value is one of the first inputs of the forward, by the name that the tracer gives it."""
    prefix, _, number = name.rpartition("_")
    return prefix == "primals" and number.isdigit() and int(number) <= state

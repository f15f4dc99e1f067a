"""The backward of a stage in two parts, without a change to its modules: input gradients first, weight gradients
later.

In autograd's graph, nodes between the outputs and the stage's inputs are the trunk; what leads from there to a
weight is a branch. The first part runs the trunk and notes the gradient that enters each node with a branch. The
second starts again at those nodes and runs only the branches.

    output ── Addmm ── Relu ── Addmm ── input        trunk
                └─ T ── weight   └─ T ── weight      branches

A weight that hangs on several trunk nodes would be counted again by every node above it. Where all its ways up go
through one node beside the trunk, its stem, the first part takes the gradient of that node's results along and
the second starts there; so it is with a decoder's first layer, which attention and later layers use. Else it
gets its gradient in the first part, and so does one of a recurrent layer on the trunk whose library makes both
gradients in one go. A stage without inputs that want a gradient has no trunk: all is done in the second part.

Between the parts a micro-batch holds the gradients that were noted, and of what its forward saved only what the
second part asks for. Which that is, is seen at the first micro-batch, where both parts run at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bapipe.torch.device.gradient_layout import add_gradient
from bapipe.torch.stage.autograd_graph import Anatomy, dissect, nodes_of
from bapipe.torch.stage.saved_tensors import SavedValues

__all__ = ["DelayedWeights", "SplitBackward"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DelayedWeights:
    """What the second part needs; holds the graph of the micro-batch from the uppermost branch down."""

    entered: tuple[tuple[Node, list[tuple[Tensor | None, ...]], tuple[Tensor, ...]], ...]
    """trunk node, the gradients that entered it, and the weights on its branch"""
    stems: tuple[tuple[list[GradientEdge], list[Tensor | None], tuple[Tensor, ...]], ...] = ()
    """results of a stem, their gradients, and the weights below"""
    free: tuple[Tensor, ...] = ()
    """weights that no trunk leads to, with what to differentiate for them and the gradients of that"""
    outputs: tuple[Tensor | GradientEdge, ...] = ()
    output_gradients: tuple[Tensor | None, ...] = ()
    saved: SavedValues | None = None

    def gradients(self) -> list[Tensor]:
        """What it holds beside the graph."""
        noted = [item for _, gradients, _ in self.entered for entered in gradients for item in entered]
        noted += [item for _, gradients, _ in self.stems for item in gradients]
        return [item for item in (*noted, *self.output_gradients) if item is not None]

    def run(self) -> None:
        """Add the weight gradients to `.grad`."""
        for node, gradients, weights in self.entered:
            for entered in gradients:
                _add_below([GradientEdge(node, number) for number in range(len(entered))], entered, weights)
        for edges, found, weights in self.stems:
            _add_below(edges, found, weights)
        if self.free:
            _add(self.outputs, self.output_gradients, self.free)
        if self.saved is not None:
            self.saved.keep_only(())  # a value may hold the graph that holds it


def _add_below(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> None:
    """From those edges on that a gradient came to."""
    pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    if pairs:
        _add([edge for edge, _ in pairs], [gradient for _, gradient in pairs], weights)


def _add(outputs: Sequence[Any], output_gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> None:
    """Gradients by `grad`, because `backward` does not start from edges in every version of torch."""
    _accumulate(weights, torch.autograd.grad(outputs, weights, output_gradients, allow_unused=True))


def _accumulate(values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Into `.grad`. The first is copied: two values may be given the same tensor."""
    for value, gradient in zip(values, gradients, strict=True):
        if gradient is not None:
            add_gradient(value, gradient, shared=True)


def _backward(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    results: Sequence[GradientEdge],
) -> list[Tensor | None]:
    """Gradients into `.grad` of what is wanted, and those of the results, which are returned; keeps the graph."""
    inputs: Any = (*wanted, *results)
    found = torch.autograd.grad(
        tuple(outputs), inputs, tuple(output_gradients), retain_graph=True, allow_unused=True
    )
    _accumulate(wanted, found[: len(wanted)])
    return list(found[len(wanted) :])


class SplitBackward:
    """Splits the backward of one stage's module."""

    def __init__(self, weights: Sequence[Tensor], *, fixed: bool = False) -> None:
        """`fixed`: the graph is the same for every micro-batch, so it is looked at once (some 3 µs a node)."""
        self._weights = [weight for weight in weights if weight.requires_grad]
        self._fixed = fixed
        self._anatomy: Anatomy | None = None
        self._needed: frozenset[int] = frozenset()
        """numbers of the saved values that the second part asks for"""
        self._passing: dict[int, int] = {}
        """how often the first part asks for each of the others"""
        self._count: int | None = None
        """of the saved values of which that is known"""

    def run(
        self,
        outputs: Sequence[Tensor],
        output_gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        *,
        saved: SavedValues | None = None,
    ) -> DelayedWeights:
        """The first part: gradients into the inputs' `.grad`. All outputs have a gradient, all inputs want one.

        With `saved`, what the forward saved, which must be in the same order every time, the second part of the
        first micro-batch follows at once, and from then on nothing is held that it does not need.
        """
        roots = [output.grad_fn for output in outputs]
        nodes = nodes_of(self._anatomy, roots) if self._fixed and self._anatomy is not None else None
        if nodes is None:
            self._anatomy = dissect(roots, inputs, self._weights)
            nodes = nodes_of(self._anatomy, roots)
        anatomy = self._anatomy
        assert anatomy is not None
        assert nodes is not None
        upper, lower = nodes
        entered, handles = [], []
        for branch, node in zip(anatomy.branches, upper, strict=True):
            noted: list[tuple[Tensor | None, ...]] = []
            handles.append(node.register_prehook(_noting(noted)))
            entered.append((node, noted, tuple(self._weights[index] for index in branch.weights)))
        wanted = [*inputs, *(self._weights[index] for index in anatomy.early)]
        edges = [
            [GradientEdge(node, number) for number in stem.results]
            for stem, node in zip(anatomy.stems, lower, strict=True)
        ]
        taken: list[Tensor | None] = []
        if saved is not None and len(saved) == self._count:
            saved.let_go_after(self._passing)
        try:
            if edges:
                taken = _backward(outputs, output_gradients, wanted, list(itertools.chain(*edges)))
            elif wanted:
                torch.autograd.backward(tuple(outputs), tuple(output_gradients), inputs=wanted, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        gradients = iter(taken)
        stems = tuple(
            (own, [next(gradients) for _ in own], tuple(self._weights[index] for index in stem.weights))
            for stem, own in zip(anatomy.stems, edges, strict=True)
        )
        free = tuple(self._weights[index] for index in anatomy.free)
        delayed = DelayedWeights(
            entered=tuple(entered),
            stems=stems,
            free=free,
            outputs=tuple(map(_root, outputs, output_gradients)) if free else (),
            output_gradients=tuple(output_gradients) if free else (),
            saved=saved,
        )
        if saved is None:
            return delayed
        if self._count is None:
            first = saved.asked()
            self._needed, self._count = saved.used_by(delayed.run), len(saved)
            self._passing = {number: times for number, times in first.items() if number not in self._needed}
            return DelayedWeights(entered=())
        if len(saved) == self._count:
            saved.keep_only(self._needed)
        return delayed


def _root(output: Tensor, gradient: Tensor | None) -> Tensor | GradientEdge:
    """Where to start from, without the values of the output; one that has no gradient is a loss, a single
    number."""
    return output if gradient is None else get_gradient_edge(output)


def _noting(noted: list[tuple[Tensor | None, ...]]) -> Callable[[tuple[Tensor, ...]], None]:
    def note(gradients: tuple[Tensor, ...]) -> None:
        noted.append(gradients)

    return note

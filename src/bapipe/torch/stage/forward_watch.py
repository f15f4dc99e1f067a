"""Looks for the first value of a stage's forward that is not finite. Slow: the host waits for every value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from bapipe.torch.capturing import Stage
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.compiling.compiled_layers import CompiledLayers
from bapipe.torch.stage.activation_checkpoints import CheckpointedLayers

__all__ = ["ForwardWatch", "NotFinite", "first_value"]


class NotFinite(NamedTuple):
    """A value of a layer that is not finite."""

    layer: str
    value: str
    """nan, inf or -inf"""
    place: str
    """file:line of the model's code; empty: not known"""


def first_value(tensors: Iterable[Any]) -> str | None:
    """The worst that floating tensors hold: nan, then inf, then -inf; None: all of them are finite."""
    found: set[str] = set()
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if bool(torch.isfinite(tensor).all()):
            continue
        if bool(torch.isnan(tensor).any()):
            return "nan"
        found.add("inf" if tensor.is_complex() or bool((tensor == float("inf")).any()) else "-inf")
    return "inf" if "inf" in found else "-inf" if found else None


class ForwardWatch:
    """Runs the forwards of one stage and keeps where a value first was not finite.

    Of -inf, which masks of attention are full of, only that counts which a layer gives to another.
    """

    def __init__(self) -> None:
        self.found: NotFinite | None = None
        """the first value that was not finite; None: all were"""

    def run(self, stage: Stage, values: Sequence[Any]) -> tuple[Any, ...]:
        """As `stage(*values)`."""
        layers = stage.computed_by
        if isinstance(layers, CheckpointedLayers) and layers.compiled is None:
            return self._each(layers, stage.rng_position, values)
        compiled = layers.compiled if isinstance(layers, CheckpointedLayers) else layers
        if isinstance(compiled, CompiledLayers):
            compiled.on_layer = lambda name, made: self._note(made, name, "", leaves=True)
            try:
                return compiled(stage, stage.rng_position, *values)
            finally:
                compiled.on_layer = None
        assert stage.stage_graph is not None, "only a stage that was built from a capture is watched"
        return tuple(_Watched(stage, stage.stage_graph, self._note).run(stage.rng_position, *values))

    def _each(
        self, layers: CheckpointedLayers, position: Position | None, values: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The parts of a stage of which some recompute, one after another."""
        parts, made = layers.each(values), None
        with contextlib.suppress(StopIteration):
            while True:
                stage, own = parts.send(made)
                assert stage.stage_graph is not None
                made = tuple(_Watched(stage, stage.stage_graph, self._note).run(position, *own))
        return made or ()

    def _note(self, made: Any, layer: str, place: str, *, leaves: bool) -> None:
        """What a layer has made; `leaves` says whether it goes to another."""
        if self.found is not None:
            return
        value = first_value(made if isinstance(made, (tuple, list)) else (made,))
        if value is not None and (leaves or value != "-inf"):
            self.found = NotFinite(layer, value, place)


class _Watched(fx.Interpreter):
    """The stage's captured code, operation by operation."""

    def __init__(self, stage: Stage, graph: fx.Graph, note: Callable[..., None]) -> None:
        super().__init__(stage, graph=graph)
        self._origins, self._note = stage.stage_origins, note

    def run_node(self, n: fx.Node) -> Any:
        """As the interpreter's, with a look at the result of what belongs to a layer."""
        made = super().run_node(n)
        if n.op == "call_function" and n.name in self._origins:
            layer, place = self._origins[n.name]
            self._note(made, layer, place, leaves=any(self._layer(user) != layer for user in n.users))
        return made

    def _layer(self, node: fx.Node) -> str:
        return self._origins.get(node.name, ("", ""))[0]

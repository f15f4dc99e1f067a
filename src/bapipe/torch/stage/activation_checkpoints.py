"""Layers of a stage that recompute: they keep what they received, and their forward is repeated in the backward.

A stage is run as consecutive parts. One that recomputes is a single node of autograd: its forward records no
graph, and its backward runs it again, with a graph of its own, and goes back through that at once. So a stage
never has more than one such part saved, and gradients join those of the other parts.

    forward     part 0 ── part 1 (no graph) ── part 2
    backward    part 2 ── part 1 again, and its backward ── part 0

Where backwards are done in two parts, input gradient and weight gradient, the graph of the repeated forward is
split too, and only what the weight gradients need is held until their turn. Dropout draws the same numbers, since
each random operation is seeded by its place; buffers are read as they were at the first time, and written once;
autocast is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bapipe.torch.capturing import Captured, Root, Stage
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.compiling.compiled_layers import CompiledLayers, LayerPiece, StageLayers, state_holder
from bapipe.torch.stage.saved_tensors import SavedValues
from bapipe.torch.stage.split_backward import SplitBackward

__all__ = ["CheckpointedLayers", "Deferred", "checkpoint_layers"]


class Deferred(Protocol):
    """Weight gradients that wait for their turn."""

    def run(self) -> None: ...


class _Layers(Protocol):
    """Consecutive layers, as they were captured or compiled."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The captured layers."""
        ...

    def state(self) -> list[list[Tensor]]:
        """Weights and buffers that the whole stage has now."""
        ...

    def run(
        self,
        received: Sequence[Any],
        roots: Mapping[int, Any],
        position: Position | None,
        deferred: list[Any] | None,
        state: Sequence[Sequence[Tensor]],
        /,
    ) -> tuple[Any, ...]: ...


class _CapturedLayers:
    """Layers that run as they were captured."""

    def __init__(self, stage: Stage, whole: Stage) -> None:
        self.stage = stage
        self._roots = stage.stage_spec.roots
        self.names = [name for name, _ in (*stage.named_parameters(), *stage.named_buffers())]
        self._holders = [state_holder(whole, stage, name) for name in self.names]
        self._own = [tensor for _, tensor in (*stage.named_parameters(), *stage.named_buffers())]

    @property
    def stages(self) -> Sequence[Stage]:
        return (self.stage,)

    def state(self) -> list[list[Tensor]]:
        return [[getattr(module, name) for module, name in self._holders]]

    def values(self, received: Sequence[Any], roots: Mapping[int, Any]) -> tuple[Any, ...]:
        return (*received, *(roots[root.index] for root in self._roots))

    def run(
        self,
        received: Sequence[Any],
        roots: Mapping[int, Any],
        position: Position | None,
        _deferred: list[Any] | None,
        state: Sequence[Sequence[Tensor]],
    ) -> tuple[Any, ...]:
        self.stage.__dict__["rng_position"] = position
        pairs = zip(self.names, state[0], self._own, strict=True)
        others = {name: given for name, given, own in pairs if given is not own}
        values = self.values(received, roots)
        return tuple(functional_call(self.stage, others, values) if others else self.stage(*values))


class _CompiledRun:
    """Layers that run compiled, one after another."""

    def __init__(self, pieces: Sequence[LayerPiece]) -> None:
        self.pieces = tuple(pieces)

    @property
    def stages(self) -> Sequence[Stage]:
        return [piece.stage for piece in self.pieces]

    def state(self) -> list[list[Tensor]]:
        return [piece.state() for piece in self.pieces]

    def run(
        self,
        received: Sequence[Any],
        roots: Mapping[int, Any],
        position: Position | None,
        deferred: list[Any] | None,
        state: Sequence[Sequence[Tensor]],
    ) -> tuple[Any, ...]:
        made = tuple(received)
        for piece, own in zip(self.pieces, state, strict=True):
            made = piece(made, roots, position, deferred, own)
        return made


class _Part:
    """Consecutive layers of a stage that are run together."""

    def __init__(self, layers: _Layers, *, recompute: bool) -> None:
        self.layers = layers
        self.recompute = recompute
        first, last = layers.stages[0].stage_spec, layers.stages[-1].stage_spec
        self.takes_gradient = tuple(value.requires_grad for value in first.received)
        self.sends_gradient = None if last.is_last else tuple(value.requires_grad for value in last.sent)
        parameters = {id(item): item for stage in layers.stages for item in stage.parameters()}
        self.weights = [item for item in parameters.values() if item.requires_grad]
        self.token = torch.empty(0, requires_grad=True)
        """stands for its weights in the graph of the stage, where it is a single node"""
        self.cast = False
        """whether autocast has kept casts of its weights, in this global batch"""
        whole = any(stage.stage_spec.whole for stage in layers.stages)
        self.watches = not whole
        self.split = SplitBackward(self.weights, fixed=not whole)
        self._saved_names = [set(stage.state_dict(keep_vars=True)) for stage in layers.stages]

    @property
    def is_free(self) -> bool:
        """Whether no gradient goes on from it to what the stage received."""
        return not any(self.takes_gradient)

    def before(self, state: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The state with copies of the buffers that a forward may write."""
        written = [
            {id(buffer) for name, buffer in stage.named_buffers() if name in saved}
            for stage, saved in zip(self.layers.stages, self._saved_names, strict=True)
        ]
        return [
            [item.clone() if id(item) in own else item for item in items]
            for own, items in zip(written, state, strict=True)
        ]


class CheckpointedLayers:
    """What a stage runs in place of its captured code: its layers in parts, some of which recompute."""

    def __init__(self, parts: Sequence[_Part], *, compiled: CompiledLayers | None) -> None:
        self._parts = tuple(parts)
        self.compiled = compiled
        """its layers, where they run compiled"""
        self.roots: tuple[Root, ...] = ()
        self.deferred: list[Any] | None = None
        """where backwards of the forwards from now on leave their weight gradients; None: they compute them"""
        self.defers = False
        """whether captured layers leave them there now: in the first part of a backward"""

    def begin(self) -> None:
        """A global batch begins: no casts are kept."""
        for part in self._parts:
            part.cast = False

    @property
    def tokens(self) -> list[Tensor]:
        """What stands for the weights of parts through which no gradient goes on."""
        return [part.token for part in self._parts if part.recompute and part.is_free]

    @property
    def shared(self) -> list[nn.Parameter]:
        """Weights that several parts use, whose gradients come part by part."""
        seen: set[int] = set()
        found: dict[int, nn.Parameter] = {}
        for part in self._parts:
            for weight in part.weights:
                if id(weight) in seen:
                    found[id(weight)] = weight
            seen |= {id(weight) for weight in part.weights}
        return list(found.values())

    def __call__(self, _stage: Stage, position: Position | None, *values: Any) -> tuple[Any, ...]:
        count = len(values) - len(self.roots)
        roots = {root.index: value for root, value in zip(self.roots, values[count:], strict=True)}
        made: tuple[Any, ...] = tuple(values[:count])
        del values
        for part in self._parts:
            if part.recompute and torch.is_grad_enabled() and (part.weights or any(part.takes_gradient)):
                made = self._recomputing(part, made, roots, position)
            else:
                made = part.layers.run(made, roots, position, self.deferred, part.layers.state())
        return made

    def each(self, values: Sequence[Any]) -> Generator[tuple[Stage, tuple[Any, ...]], Any, None]:
        """The captured code of each part with its values, to be run by others, who send what it made."""
        count = len(values) - len(self.roots)
        roots = {root.index: value for root, value in zip(self.roots, values[count:], strict=True)}
        made: Any = tuple(values[:count])
        for part in self._parts:
            for stage in part.layers.stages:
                own = (*made, *(roots[root.index] for root in stage.stage_spec.roots))
                made = yield stage, own

    def _recomputing(
        self, part: _Part, received: tuple[Any, ...], roots: Mapping[int, Any], position: Position | None
    ) -> tuple[Any, ...]:
        state = part.layers.state()
        needed = {root.index for stage in part.layers.stages for root in stage.stage_spec.roots}
        job = _Job(
            part=part,
            owner=self,
            roots={index: value for index, value in roots.items() if index in needed},
            position=position,
            state=state,
            deferred=self.deferred,
        )
        made: tuple[Any, ...] = _Recomputed.apply(job, part.token, *received)  # type: ignore[no-untyped-call]
        return made


class _Job:
    """One micro-batch's forward of a part, to be repeated."""

    def __init__(
        self,
        *,
        part: _Part,
        owner: CheckpointedLayers,
        roots: Mapping[int, Any],
        position: Position | None,
        state: list[list[Tensor]],
        deferred: list[Any] | None,
    ) -> None:
        self.part, self._owner = part, owner
        self._roots, self._position = roots, position
        self._state, self._deferred = state, deferred
        self._before = part.before(state)
        self._modes = _autocast_modes()

    def first(self, received: Sequence[Any]) -> tuple[Any, ...]:
        """The forward, without a graph. The first that casts weights has one all the same, which is let go:
        autocast keeps its casts for all micro-batches, and gradients go back through them."""
        part = self.part
        casts = any(enabled for _, enabled, _ in self._modes) and not part.cast
        with _unwatched_graph() if casts else torch.no_grad():
            made = part.layers.run(received, self._roots, self._position, None, self._state)
        part.cast = part.cast or casts
        self._state = []
        return tuple(item.detach() if isinstance(item, Tensor) and item.requires_grad else item for item in made)

    def again(self, received: Sequence[Any], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The forward once more and its backward: gradients into the weights' `.grad`, those of what was received
        are returned."""
        part = self.part
        values = [
            value.detach().requires_grad_() if takes and isinstance(value, Tensor) else value
            for value, takes in zip(received, part.takes_gradient, strict=True)
        ]
        wanted = [value for value, takes in zip(values, part.takes_gradient, strict=True) if takes]
        deferred = self._deferred if self._owner.compiled is not None or self._owner.defers else None
        splits = deferred is not None and self._owner.compiled is None
        saved = SavedValues() if splits and part.watches else None
        with torch.enable_grad():
            with _autocast_as(self._modes), contextlib.nullcontext() if saved is None else saved.watching():
                made = part.layers.run(values, self._roots, self._position, deferred, self._before)
            pairs = [
                (item, gradient)
                for item, gradient in zip(made, gradients, strict=True)
                if gradient is not None and isinstance(item, Tensor) and item.requires_grad
            ]
            del made
            self._before = []
            outputs, given = [item for item, _ in pairs], [gradient for _, gradient in pairs]
            del pairs
            if outputs and splits:
                assert deferred is not None
                deferred.append(part.split.run(outputs, given, wanted, saved=saved))
            elif outputs:
                torch.autograd.backward(outputs, given)
        found = [value.grad if takes else None for value, takes in zip(values, part.takes_gradient, strict=True)]
        for value in wanted if splits else ():  # the graph that waits holds them by its ends
            value.grad = None
            if saved is not None:
                value.data = value.new_empty(0)
        return found


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, _token: Tensor, *received: Tensor) -> tuple[Any, ...]:
        made = job.first(received)
        ctx.job = job
        ctx.save_for_backward(*received)
        ctx.set_materialize_grads(False)
        flags = job.part.sends_gradient
        if flags is not None:
            ctx.mark_non_differentiable(
                *(item for item, has in zip(made, flags, strict=True) if not has and isinstance(item, Tensor))
            )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(ctx.saved_tensors))
        return (None, None, *ctx.job.again(ctx.saved_tensors, gradients))


@contextlib.contextmanager
def _unwatched_graph() -> Iterator[None]:
    """A graph is recorded, of which nobody counts what it saves."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda item: item, lambda item: item):
        yield


_Modes = tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_modes() -> _Modes:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )


@contextlib.contextmanager
def _autocast_as(modes: _Modes) -> Iterator[None]:
    """As it was in the forward. Not by `torch.autocast`, whose end lets go of all casts in the threads of a
    backward, which do not know that a region around them goes on."""
    now, keeps = _autocast_modes(), torch.is_autocast_cache_enabled()
    _set_autocast(modes)
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        _set_autocast(now)
        torch.set_autocast_cache_enabled(keeps)


def _set_autocast(modes: _Modes) -> None:
    for kind, enabled, dtype in modes:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def checkpoint_layers(
    stage: Stage, captured: Captured, layers: StageLayers, runs: Sequence[tuple[int, int]], device: torch.device
) -> CheckpointedLayers:
    """Let a stage of the captured model, which is on the device and may be compiled, recompute these layers: first
    and last of each run, which are whole layers of the stage."""
    compiled = stage.computed_by if isinstance(stage.computed_by, CompiledLayers) else None
    parts = []
    for first, last, again in _divided(layers.first, layers.last, runs):
        if compiled is not None:
            own: _Layers = _CompiledRun(compiled.pieces[first - layers.first : last - layers.first + 1])
        else:
            alone = captured.stage(
                first,
                last,
                parts={layer: part for layer, part in layers.parts.items() if first <= layer <= last},
                store=layers.store,
                device=device,
                count_loss=layers.count_loss,
            )
            own = _CapturedLayers(alone.to(device), stage)
        parts.append(_Part(own, recompute=again))
    made = CheckpointedLayers(parts, compiled=compiled)
    roots = {root.index: root for part in parts for one in part.layers.stages for root in one.stage_spec.roots}
    spec = replace(stage.stage_spec, roots=tuple(roots[index] for index in sorted(roots)))
    made.roots = spec.roots
    stage.run_by(made, spec)
    return made


def _divided(first: int, last: int, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """All layers of a stage as runs, and whether each recomputes."""
    at = first
    for begin, end in sorted(runs):
        if at < begin:
            yield at, begin - 1, False
        yield begin, end, True
        at = end + 1
    if at <= last:
        yield at, last, False

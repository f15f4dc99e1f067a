"""The layers of a stage, compiled one by one; what cannot be compiled runs as it was captured.

A layer is compiled when it first runs with inputs of some shapes and dtypes, and layers of equal structure once:
the time to compile does not grow with the depth of a model, and a profile measures what a run executes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured, Root, Stage
from bapipe.torch.capturing.layer_signature import layer_signatures
from bapipe.torch.capturing.seeded_rng import Position, seed_rng
from bapipe.torch.compiling.inductor_internals import Backend, check_compiler
from bapipe.torch.compiling.layer_program import (
    BackwardKinds,
    DeferredGradients,
    LayerFunction,
    LayerProgram,
    compile_layer,
)
from bapipe.torch.compiling.seeded_dropout import random_key
from bapipe.torch.compiling.traced_layer import TracedLayer

__all__ = [
    "CompiledLayers",
    "CompiledPrograms",
    "FlatFunction",
    "LayerPiece",
    "StageLayers",
    "state_holder",
    "warm_up",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Which layers a stage has, and how it was captured."""

    first: int
    last: int
    """included"""
    parts: Mapping[int, tuple[int, int]]
    """layer -> channels, of those it has only a part of"""
    store: dict[tuple[str, int, int], Tensor]
    """slices of weights that its parts share with other stages"""
    count_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatFunction:
    """A function of tensors without side effects, and what its arguments are."""

    run: Callable[..., tuple[Tensor, ...]]
    """returns its outputs, then new values of the buffers that are written"""
    takes_gradient: Sequence[bool]
    """per argument"""
    weights: int = 0
    """how many of the arguments, the first ones, are parameters"""
    state: int = 0
    """how many, the first ones, are parameters, buffers or constants"""
    written: tuple[int, ...] = ()
    """which of the arguments are buffers that are written"""


class CompiledPrograms:
    """The compiled layers of one process, by structure."""

    def __init__(
        self,
        device: torch.device,
        *,
        whole: bool = True,
        split: bool = False,
        say: Callable[[str], None] | None = None,
        backend: Backend = "inductor",
    ) -> None:
        """`whole`, `split`: how backwards are done; `say` is called with a line for each program, which is logged
        too. Raises BaPipeError where nothing can be compiled for the device."""
        if backend == "inductor":
            check_compiler(device)
        self.device = device
        self.compiled = 0
        """programs so far"""
        self.failed: dict[str, str] = {}
        """name of a layer that runs as it was captured -> why"""
        self._whole, self._split = whole, split
        self._say = say
        self._backend: Backend = backend
        self._programs: dict[Any, LayerProgram | None] = {}
        self._signatures: dict[int, tuple[Any, tuple[str, ...]]] = {}
        self._distinct: set[Any] = set()

    def attach(self, stage: Stage, captured: Captured, layers: StageLayers) -> CompiledLayers:
        """Let a stage of the captured model, which is on the device, run its layers compiled."""
        signatures = self._signatures_of(captured)
        pieces = []
        for layer in range(layers.first, layers.last + 1):
            part = layers.parts.get(layer)
            alone = captured.stage(
                layer,
                layer,
                parts={} if part is None else {layer: part},
                store=layers.store,
                device=self.device,
                count_loss=layers.count_loss,
            ).to(self.device)
            key = (signatures[layer], part, layers.count_loss and layer + 1 == len(captured.layers))
            self._distinct.add(key)
            pieces.append(LayerPiece(self, captured.layers[layer].name, key, alone, stage))
        compiled = CompiledLayers(pieces)
        roots = {root.index: root for piece in pieces for root in piece.stage.stage_spec.roots}
        spec = replace(stage.stage_spec, roots=tuple(roots[index] for index in sorted(roots)))
        compiled.roots = spec.roots
        stage.run_by(compiled, spec)
        return compiled

    def _signatures_of(self, captured: Captured) -> tuple[str, ...]:
        known = self._signatures.get(id(captured.program))
        if known is None:
            found = layer_signatures(captured.program, captured.groups)
            known = self._signatures[id(captured.program)] = (captured.program, found)
        return known[1]

    def program(self, piece: LayerPiece, arguments: Sequence[Tensor]) -> LayerProgram | None:
        """The program for these arguments of a layer, compiled if need be; None: it cannot be compiled."""
        traced = piece.traced
        assert traced is not None
        function = FlatFunction(
            run=traced.run,
            weights=len(traced.weights),
            state=len(traced.weights) + len(traced.state),
            written=tuple(len(traced.weights) + traced.state.index(name) for name in traced.written),
            takes_gradient=piece.takes_gradient(len(arguments)),
        )
        return self.of_function(piece.key, piece.name, function, arguments)

    def of_function(
        self, key: Any, name: str, function: FlatFunction, arguments: Sequence[Tensor]
    ) -> LayerProgram | None:
        """The program of a function for these arguments, compiled if need be; None: it cannot be compiled.

        Functions with equal keys compute the same.
        """
        about = (key, *((item.shape, item.dtype) for item in arguments), _autocast(self.device))
        if about in self._programs:
            return self._programs[about]
        begun = time.perf_counter()
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                program = self._compile(function, arguments)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.fail(name, error)
            program = None
        else:
            self.compiled += 1
            count, seconds = max(self.compiled, len(self._distinct)), time.perf_counter() - begun
            line = f"compiled layer {self.compiled} of {count} distinct ('{name}'): {seconds:.1f} s"
            _logger.info("%s", line)
            if self._say is not None:
                self._say(line)
        self._programs[about] = program
        return program

    def fail(self, name: str, error: Exception) -> None:
        """Note, once, that a layer runs as it was captured."""
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        if not isinstance(error, BaPipeError):
            reason = f"{type(error).__name__}: {reason}"
        self.failed[name] = reason
        _logger.warning("layer '%s' is not compiled and runs as captured: %s", name, reason)

    def _compile(self, flat: FlatFunction, arguments: Sequence[Tensor]) -> LayerProgram:
        flags = flat.takes_gradient
        examples = [item.detach().requires_grad_(flag) for item, flag in zip(arguments, flags, strict=True)]
        for index in flat.written:
            examples[index] = examples[index].clone()
        run, differentiable = _look(flat, examples)
        function = LayerFunction(
            run=run,
            arguments=len(examples),
            weights=flat.weights,
            state=flat.state,
            outputs=len(differentiable),
            written=flat.written,
        )
        split = self._split and flat.weights > 0
        backward = BackwardKinds(whole=self._whole or not split, split=split)
        program = compile_layer(function, examples, differentiable, backward, backend=self._backend)
        ways = [apart for apart, wanted in ((False, backward.whole), (True, split)) if wanted]
        _try(program, examples, differentiable, ways)
        return program


def _autocast(device: torch.device) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _look(flat: FlatFunction, examples: Sequence[Tensor]) -> tuple[Callable[..., Any], tuple[bool, ...]]:
    """Run it once to see which outputs have a gradient; the function, with outputs that share memory copied."""
    made = flat.run(*examples)
    outputs = made[: len(made) - len(flat.written)]
    known = {item.untyped_storage().data_ptr() for item in examples if item.numel()}
    copied = set()
    for index, value in enumerate(outputs):
        address = value.untyped_storage().data_ptr()
        if value.numel() and address in known:
            copied.add(index)
        known.add(address)

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        found = flat.run(*arguments)
        return tuple(value.clone() if index in copied else value for index, value in enumerate(found))

    return run, tuple(value.requires_grad for value in outputs)


def _try(
    program: LayerProgram, examples: Sequence[Tensor], differentiable: Sequence[bool], ways: Sequence[bool]
) -> None:
    """Run all that was compiled once, the backward whole or split; what does not run is not used."""
    weights = [item.detach() for item in examples[: program.weights]]
    for apart in ways:
        deferred: list[DeferredGradients] | None = [] if apart else None
        with torch.no_grad():
            outputs, saved = program.run(examples)
            if any(differentiable):
                program.backward(saved, [torch.zeros_like(item) for item in outputs], weights, deferred)
            for item in deferred or ():
                item.run()


class LayerPiece:
    """One layer of a stage."""

    def __init__(self, programs: CompiledPrograms, name: str, key: Any, stage: Stage, whole: Stage) -> None:
        self.stage = stage
        """the layer alone, as captured"""
        self.name = name
        self.key = key
        """equal for layers that can share a program"""
        self.traced: TracedLayer | None = None
        """None: it cannot be compiled"""
        self._programs = programs
        self._spec = stage.stage_spec
        try:
            self.traced = TracedLayer(stage)
        except BaPipeError as error:
            programs.fail(name, error)
        self._holders: list[tuple[nn.Module, str]] = []
        self._names: list[str] = []
        """of weights and buffers, which the whole stage may be given others for"""
        if self.traced is not None:
            self._names = [*self.traced.weights, *self.traced.state]
        else:
            self._names = [name for name, _ in (*stage.named_parameters(), *stage.named_buffers())]
        self._holders = [state_holder(whole, stage, name) for name in self._names]
        self._own = [getattr(module, name) for module, name in self._holders]
        self._known: dict[Any, LayerProgram | None] = {}

    def __call__(
        self,
        received: Sequence[Any],
        roots: Mapping[int, Any],
        position: Position | None,
        deferred: list[DeferredGradients] | None,
        state: Sequence[Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """What the layer makes of these values; with `state`, of other weights and buffers than the stage has."""
        values = [*received, *(roots[root.index] for root in self._spec.roots)]
        traced = self.traced
        state = self.state() if state is None else state
        if traced is None or not all(isinstance(value, Tensor) for value in values):
            return self._eager(values, state, position)
        values = [value.contiguous() for value in values]
        key = [random_key(position, traced.numbers)] if traced.numbers else []
        arguments = [*state, *key, *values]
        about = (*((value.dtype, value.shape) for value in values), _autocast(self._programs.device))
        if about not in self._known:
            self._known[about] = self._programs.program(self, arguments)
        program = self._known[about]
        if program is None:
            return self._eager(values, state, position)
        if traced.seeds_itself is not None and position is not None:
            seed_rng(*position, traced.seeds_itself, self._programs.device)
        computed = iter(program(arguments, deferred))
        return tuple(
            next(computed) if item.computed else item.constant if item.passed is None else values[item.passed]
            for item in traced.results
        )

    def state(self) -> list[Tensor]:
        """Weights and buffers that the whole stage has now."""
        return [getattr(module, name) for module, name in self._holders]

    def takes_gradient(self, count: int) -> list[bool]:
        """Which of so many arguments require a gradient: weights, and received values as they were captured."""
        received = [value.requires_grad for value in self._spec.received]
        own = [item.requires_grad for item in self._own]
        others = count - len(own) - len(received) - len(self._spec.roots)
        return [*own, *[False] * others, *received, *[False] * len(self._spec.roots)]

    def _eager(self, values: Sequence[Any], state: Sequence[Tensor], position: Position | None) -> tuple[Any, ...]:
        self.stage.rng_position = position
        others = {
            name: given for name, given, own in zip(self._names, state, self._own, strict=True) if given is not own
        }
        if others:
            made: tuple[Any, ...] = functional_call(self.stage, others, tuple(values))
            return made
        return tuple(self.stage(*values))


def state_holder(whole: Stage, alone: Stage, name: str) -> tuple[nn.Module, str]:
    """The module that has the weight or buffer: the whole stage's, or of a constant the layer's own."""
    path, _, own = name.rpartition(".")
    for stage in (whole, alone):
        module: Any = stage
        for part in path.split(".") if path else ():
            module = getattr(module, part, None)
        if module is not None and hasattr(module, own):
            return module, own
    raise AssertionError(f"no module has '{name}'")


class CompiledLayers:
    """What a stage runs in place of its captured code: its layers one after another."""

    def __init__(self, pieces: Sequence[LayerPiece]) -> None:
        self.pieces = tuple(pieces)
        """its layers, in order"""
        self.roots: tuple[Root, ...] = ()
        """the model's inputs that the layers take, in the order in which they are given"""
        self.deferred: list[DeferredGradients] | None = None
        """where backwards of the forwards from now on leave their weight gradients; None: they compute them"""
        self.on_layer: Callable[[str, tuple[Any, ...]], None] | None = None
        """called with every layer's name and what it made; None: nobody looks"""

    def __call__(self, _stage: Stage, position: Position | None, *values: Any) -> tuple[Any, ...]:
        count = len(values) - len(self.roots)
        roots = {root.index: value for root, value in zip(self.roots, values[count:], strict=True)}
        made: tuple[Any, ...] = tuple(values[:count])
        for piece in self.pieces:
            made = piece(made, roots, position, self.deferred)
            if self.on_layer is not None:
                self.on_layer(piece.name, made)
        return made


def warm_up(stage: Stage, captured: Captured, size: int, device: torch.device) -> None:
    """Compile the layers of a stage by running it once on `size` samples; nothing of the model changes."""
    spec = stage.stage_spec
    args, kwargs = captured.examples.resized(size).tree()
    leaves = captured.input_leaves(args, kwargs)
    received = [torch.zeros(value.shape(size), dtype=value.dtype, device=device) for value in spec.received]
    roots = [leaves[root.index] for root in spec.roots]
    values = (*received, *(leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in roots))
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    devices = [device] if device.type == "cuda" else []
    stage.rng_position = None
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        functional_call(stage, buffers, values)

"""A model as consecutive layers that can be run one by one, as they were captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import Precision
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.layer_signature import layer_signatures
from bapipe.torch.capturing.loss_graph import NO_LOSS, own_loss
from bapipe.torch.capturing.self_check import self_check
from bapipe.torch.capturing.torch_internals import flatten, flatten_recurrent, unflatten
from bapipe.torch.compiling.compiled_layers import CompiledLayers, CompiledPrograms, StageLayers
from bapipe.torch.compiling.layer_program import DeferredGradients
from bapipe.torch.device.dtypes import autocast_dtype, weights_dtype
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.profiler.measurement import MeasuredLayer, Repeats
from bapipe.torch.profiler.mixed_layers import MixedLayers
from bapipe.torch.profiler.repeated_layers import find_repeats, kept_layers

__all__ = [
    "CapturedLayers",
    "DistinctLayers",
    "LayerSequence",
    "RunnableLayer",
    "cast_weights",
    "chain_of",
    "compile_layers",
    "on_device",
    "run_once",
    "tensors_of",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunnableLayer:
    """Consecutive layers, ready to run on the device."""

    first: int
    last: int
    run: Callable[..., tuple[Any, ...]]
    """takes the received values, then the roots; returns the values sent on, or the leaves of the output"""
    parameters: tuple[nn.Parameter, ...]
    """those with a gradient"""
    receives: tuple[bool, ...]
    """per received value, whether a gradient goes back for it"""
    roots: tuple[int, ...]
    """inputs of the model that it takes besides, as indices of the flattened (args, kwargs)"""
    overwrites: bool
    """whether it writes over what it receives, which must then not be a leaf"""
    state: tuple[Tensor, ...] = ()
    """parameters and buffers"""
    mixed: MixedLayers | None = None
    """where weights are cast for it, in mixed precision"""
    compiled: tuple[CompiledLayers, ...] = ()
    """what runs it, if it is compiled"""

    def known_storages(self) -> set[int]:
        """Addresses of parameters and buffers, and of what autocast keeps of them."""
        own = {item.untyped_storage().data_ptr() for item in (*self.state, *self.parameters)}
        return own if self.mixed is None else own | self.mixed.addresses

    def forward_deferring(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[DeferredGradients]]:
        """Of a compiled piece: the outputs of a forward, and where its backward will leave the weight
        gradients."""
        deferred: list[DeferredGradients] = []
        for layers in self.compiled:
            layers.deferred = deferred
        try:
            return self.run(*arguments), deferred
        finally:
            for layers in self.compiled:
                layers.deferred = None


def run_once(piece: RunnableLayer, values: Sequence[Any]) -> tuple[Any, ...]:
    """What the piece makes, without a graph. In mixed precision its weights are cast from then on, unless it is
    compiled: then it casts them itself, every time."""
    mixed = None if piece.compiled else piece.mixed
    with torch.no_grad():
        made = piece.run(*values) if mixed is None else mixed.noted(piece.run, piece.parameters, values)
    return tuple(value.detach() if isinstance(value, Tensor) else value for value in made)


def cast_weights(piece: RunnableLayer, values: Sequence[Any]) -> None:
    """See to it that the piece's weights are cast, in mixed precision, and that it is known which are."""
    if piece.mixed is not None and not piece.compiled and not piece.mixed.knows(piece.parameters):
        run_once(piece, [value.clone() for value in values] if piece.overwrites else values)


class LayerSequence(Protocol):
    """Layers to measure, of one model on one device."""

    layers: tuple[MeasuredLayer, ...]
    repeats: Repeats | None
    """how they stand for the model's; None: they are the model's"""
    module: nn.Module
    """the whole model"""
    mixed: MixedLayers | None
    """where its weights are cast, in mixed precision"""
    device: torch.device
    fingerprint: str
    notes: tuple[str, ...]
    programs: CompiledPrograms | None
    """the compiled layers; None: they run as they were captured"""

    def at(self, size: int) -> LayerSequence:
        """The chain that runs so many samples."""

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Leaves of the example with so many samples, on the device; and how to call the module with them."""

    def piece(self, first: int, last: int, *, part: tuple[int, int] | None = None) -> RunnableLayer:
        """Layers `first` to `last`, included; or channels start to stop of one layer that can be divided."""

    def whole_model(self) -> RunnableLayer:
        """All layers of the model as one stage."""

    def state(self) -> list[Tensor]:
        """Parameters and buffers of the model, each once."""


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among the leaves of nested tuples, lists, dicts and registered dataclasses."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def on_device(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A leaf of the inputs on the device, in memory of its own; floats in the dtype."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device=device, dtype=dtype if leaf.is_floating_point() else leaf.dtype, copy=True)


def _state(module: nn.Module) -> list[Tensor]:
    found = {id(item): item for item in (*module.parameters(), *module.buffers())}
    return list(found.values())


class CapturedLayers:
    """The layers that `bapipe.torch.capturing` found, run as stages of their own."""

    repeats: Repeats | None = None

    def __init__(
        self,
        captured: Captured,
        *,
        device: torch.device,
        dtype: torch.dtype,
        mixed: MixedLayers | None = None,
        programs: CompiledPrograms | None = None,
    ) -> None:
        self.captured = captured
        self.mixed = mixed
        self.programs = programs
        self.module = captured.module.to(device=device).train()
        self.device = device
        self.dtype = dtype
        self.fingerprint = captured.fingerprint
        self.notes = captured.notes
        model = captured.to_model()
        frozen = any(not item.requires_grad for item in captured.module.parameters())
        self.layers = tuple(
            MeasuredLayer(
                name=layer.name,
                parameters=known.parameters,
                weight_bytes=float(layer.weight_bytes),
                shares_weights_with=known.shares_weights_with,
                split=layer.split,
                trainable_bytes=float(layer.trainable_bytes) if frozen else None,
                modules=layer.modules,
            )
            for layer, known in zip(captured.layers, model.layers, strict=True)
        )

    def at(self, size: int) -> CapturedLayers:
        if self.captured.dynamic or size == self.captured.batch:
            return self
        self.module.to("cpu")
        chain = CapturedLayers(
            self.captured.at(size), device=self.device, dtype=self.dtype, mixed=self.mixed, programs=self.programs
        )
        if [layer.name for layer in chain.layers] != [layer.name for layer in self.layers]:
            raise BaPipeError(
                f"the model has other layers with {size} samples than with {self.captured.batch}; profile one size"
            )
        return chain

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        args, kwargs = self.captured.examples.resized(size).tree()
        leaves, spec = flatten((args, kwargs))

        def call(given: Sequence[Any]) -> Any:
            own_args, own_kwargs = unflatten(given, spec)
            return self.module(*own_args, **own_kwargs)

        run = call if self.mixed is None else self.mixed.under(call)
        return [on_device(leaf, self.device, self.dtype) for leaf in leaves], run

    def piece(self, first: int, last: int, *, part: tuple[int, int] | None = None) -> RunnableLayer:
        parts = {} if part is None else {first: part}
        store: dict[tuple[str, int, int], Tensor] = {}
        stage = self.captured.stage(first, last, parts=parts, store=store, device=self.device).to(self.device)
        if part is not None:
            flatten_recurrent(self.module, dict(stage.named_parameters()))
        compiled: tuple[CompiledLayers, ...] = ()
        if self.programs is not None:
            layers = StageLayers(first=first, last=last, parts=parts, store=store)
            compiled = (self.programs.attach(stage, self.captured, layers),)
        spec = stage.stage_spec
        return RunnableLayer(
            first=first,
            last=last,
            run=stage if self.mixed is None else self.mixed.under(stage),
            parameters=tuple(item for item in stage.parameters() if item.requires_grad),
            receives=tuple(value.requires_grad for value in spec.received),
            roots=tuple(root.index for root in spec.roots),
            overwrites=False,
            state=tuple(_state(stage)),
            mixed=self.mixed,
            compiled=compiled,
        )

    def whole_model(self) -> RunnableLayer:
        return self.piece(0, len(self.layers) - 1)

    def state(self) -> list[Tensor]:
        return _state(self.module)


class DistinctLayers:
    """Of layers that repeat each other those that are measured, as a shorter chain."""

    def __init__(self, chain: CapturedLayers, kept: Sequence[int], repeats: Repeats) -> None:
        self._chain = chain
        self._kept = tuple(kept)
        self._whole: RunnableLayer | None = None
        self.repeats: Repeats | None = repeats
        self.layers = tuple(chain.layers[index] for index in kept)
        self.module, self.device, self.mixed = chain.module, chain.device, chain.mixed
        self.fingerprint, self.notes = chain.fingerprint, chain.notes
        self.programs = chain.programs

    def at(self, size: int) -> DistinctLayers:
        chain = self._chain.at(size)
        assert self.repeats is not None
        return self if chain is self._chain else DistinctLayers(chain, self._kept, self.repeats)

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        return self._chain.inputs(size)

    def piece(self, first: int, last: int, *, part: tuple[int, int] | None = None) -> RunnableLayer:
        pieces = [
            self._chain.piece(self._kept[start], self._kept[end], part=part)
            for start, end in _consecutive(self._kept, first, last)
        ]
        found = pieces[0] if len(pieces) == 1 else _one_after_another(pieces)
        return replace(found, first=first, last=last)

    def whole_model(self) -> RunnableLayer:
        if self._whole is None:
            self._whole = self._chain.whole_model()
        return self._whole

    def state(self) -> list[Tensor]:
        return self._chain.state()


def _consecutive(kept: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """(start, end), included, of the stretches of kept layers that follow each other in the model too."""
    found = [(first, first)]
    for index in range(first + 1, last + 1):
        if kept[index] == kept[index - 1] + 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def _one_after_another(pieces: Sequence[RunnableLayer]) -> RunnableLayer:
    """Pieces as one: what each sends is what the next receives."""
    roots = tuple(dict.fromkeys(root for piece in pieces for root in piece.roots))
    parameters = {id(item): item for piece in pieces for item in piece.parameters}
    state = {id(item): item for piece in pieces for item in piece.state}

    def run(*values: Any) -> tuple[Any, ...]:
        count = len(pieces[0].receives)
        sent, given = tuple(values[:count]), dict(zip(roots, values[count:], strict=True))
        for piece in pieces:
            sent = piece.run(*sent, *(given[root] for root in piece.roots))
        return sent

    return RunnableLayer(
        first=pieces[0].first,
        last=pieces[-1].last,
        run=run,
        parameters=tuple(parameters.values()),
        receives=pieces[0].receives,
        roots=roots,
        overwrites=pieces[0].overwrites,
        state=tuple(state.values()),
        mixed=pieces[0].mixed,
        compiled=tuple(layers for piece in pieces for layers in piece.compiled),
    )


def compile_layers(chain: LayerSequence, sizes: Sequence[int]) -> None:
    """Compile the layers for these sizes before anything is timed; sizes that do not fit are left out."""
    try:
        for size in sorted(sizes):
            sized = chain.at(size)
            leaves, _ = sized.inputs(size)
            values: Sequence[Any] = ()
            for index in range(len(sized.layers)):
                piece = sized.piece(index, index)
                values = run_once(piece, (*values, *(leaves[root] for root in piece.roots)))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()


def _check_there(captured: Captured, device: torch.device) -> None:
    """Compare the capture with eager on the device, which is much faster than the CPU, unless it does not fit
    there."""
    try:
        captured.module.to(device)
        self_check(captured, captured.examples, device)
    except BaPipeError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        captured.module.to("cpu")
        torch.cuda.empty_cache()
        self_check(captured, captured.examples)
    captured.module.zero_grad(set_to_none=True)


def chain_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    precision: Precision,
    programs: CompiledPrograms | None = None,
    needs_loss: bool = False,
) -> LayerSequence:
    """The layers of a module to measure, on the device and in the precision; the module itself is moved there.

    Layers of mixed precision are run in its region of a global batch (`LayerSequence.mixed`). With `programs` they
    run compiled. The capture is made on the CPU and checked on the device. Of blocks that compute the same two are
    measured. With `needs_loss` a model that does not return its loss is refused.
    """
    dtype, autocast = weights_dtype(precision), autocast_dtype(precision)
    mixed = None if autocast is None else MixedLayers(MixedForward(device, autocast))
    module = module.to(dtype=dtype)
    cpu = torch.device("cpu")
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    own_args, own_kwargs = unflatten([on_device(leaf, cpu, dtype) for leaf in leaves], spec)
    on_gpu = device.type == "cuda"
    captured = capture(module, own_args, own_kwargs, check=not on_gpu)
    if needs_loss and own_loss(captured.program) is None:
        raise BaPipeError(NO_LOSS)
    if on_gpu:
        _check_there(captured, device)
    chain = CapturedLayers(captured, device=device, dtype=dtype, mixed=mixed, programs=programs)
    signatures = layer_signatures(captured.program, captured.groups)
    kept = kept_layers(signatures)
    repeats = find_repeats(signatures, kept, chain.layers)
    return chain if repeats is None else DistinctLayers(chain, kept, repeats)

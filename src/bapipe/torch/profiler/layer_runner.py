"""A model as consecutive layers that can be run one by one, as they were captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.capturing.torch_internals import flatten, flatten_recurrent, unflatten
from bapipe.torch.profiler.measurement import MeasuredLayer

__all__ = ["CapturedLayers", "LayerSequence", "RunnableLayer", "chain_of", "on_device", "tensors_of"]


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


class LayerSequence(Protocol):
    """Layers of one model on one device."""

    layers: tuple[MeasuredLayer, ...]
    module: nn.Module
    device: torch.device
    fingerprint: str
    notes: tuple[str, ...]

    def at(self, size: int) -> LayerSequence:
        """The chain that runs so many samples."""

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Leaves of the example with so many samples, on the device; and how to call the module with them."""

    def piece(self, first: int, last: int, *, part: tuple[int, int] | None = None) -> RunnableLayer:
        """Layers `first` to `last`, included; or channels start to stop of one layer that can be divided."""

    def state(self) -> list[Tensor]:
        """Parameters and buffers, each once."""


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

    def __init__(self, captured: Captured, *, device: torch.device, dtype: torch.dtype) -> None:
        self.captured = captured
        self.module = captured.module.to(device=device).train()
        self.device = device
        self.dtype = dtype
        self.fingerprint = captured.fingerprint
        self.notes = captured.notes
        model = captured.to_model()
        self.layers = tuple(
            MeasuredLayer(
                name=layer.name,
                parameters=known.parameters,
                weight_bytes=float(layer.weight_bytes),
                shares_weights_with=known.shares_weights_with,
                split=layer.split,
            )
            for layer, known in zip(captured.layers, model.layers, strict=True)
        )

    def at(self, size: int) -> CapturedLayers:
        if self.captured.dynamic or size == self.captured.batch:
            return self
        self.module.to("cpu")
        chain = CapturedLayers(self.captured.at(size), device=self.device, dtype=self.dtype)
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

        return [on_device(leaf, self.device, self.dtype) for leaf in leaves], call

    def piece(self, first: int, last: int, *, part: tuple[int, int] | None = None) -> RunnableLayer:
        parts = None if part is None else {first: part}
        stage = self.captured.stage(first, last, parts=parts, device=self.device).to(self.device)
        if part is not None:
            flatten_recurrent(self.module, dict(stage.named_parameters()))
        spec = stage.stage_spec
        return RunnableLayer(
            first=first,
            last=last,
            run=stage,
            parameters=tuple(item for item in stage.parameters() if item.requires_grad),
            receives=tuple(value.requires_grad for value in spec.received),
            roots=tuple(root.index for root in spec.roots),
            overwrites=False,
            state=tuple(_state(stage)),
        )

    def state(self) -> list[Tensor]:
        return _state(self.module)


def chain_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerSequence:
    """The layers of a module, on the device and in the dtype; the module itself is moved there.

    The capture is made and checked on the CPU.
    """
    module = module.to(dtype=dtype)
    cpu = torch.device("cpu")
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    own_args, own_kwargs = unflatten([on_device(leaf, cpu, dtype) for leaf in leaves], spec)
    return CapturedLayers(capture(module, own_args, own_kwargs), device=device, dtype=dtype)

"""A model as consecutive layers that can be run one by one: an nn.Sequential's children, or what was captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.build import fingerprint
from bapipe.torch.capture import Captured, capture
from bapipe.torch.capture.private import flatten, unflatten
from bapipe.torch.measure.record import MeasuredLayer
from bapipe.torch.split import overwrites_input

__all__ = ["CapturedChain", "Chain", "Piece", "SequentialChain", "chain_of", "on_device", "tensors_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
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


class Chain(Protocol):
    """Layers of one model on one device."""

    layers: tuple[MeasuredLayer, ...]
    module: nn.Module
    device: torch.device
    fingerprint: str
    notes: tuple[str, ...]

    def at(self, size: int) -> Chain:
        """The chain that runs so many samples."""

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Leaves of the example with so many samples, on the device; and how to call the module with them."""

    def piece(self, first: int, last: int) -> Piece:
        """Layers `first` to `last`, included."""

    def state(self) -> list[Tensor]:
        """Parameters and buffers, each once."""


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among the leaves of nested tuples, lists, dicts and registered dataclasses."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _resized(leaf: Any, batch: int, size: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != batch:
        return leaf
    return torch.cat([leaf.detach()] * -(-size // batch))[:size]


def on_device(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A leaf of the inputs on the device, in memory of its own; floats in the dtype."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device=device, dtype=dtype if leaf.is_floating_point() else leaf.dtype, copy=True)


def _state(module: nn.Module) -> list[Tensor]:
    found = {id(item): item for item in (*module.parameters(), *module.buffers())}
    return list(found.values())


class SequentialChain:
    """The children of an nn.Sequential, as `bapipe run` cuts it."""

    def __init__(
        self, module: nn.Sequential, args: Sequence[Any], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim == 0:
            raise BaPipeError(
                f"an nn.Sequential takes one tensor, got {len(args)} args; return (module, (input,), {{}})"
            )
        self.module: nn.Module = module.to(device=device, dtype=dtype).train()
        self.device = device
        self.example = args[0].to(dtype) if args[0].is_floating_point() else args[0]
        self.children = list(module.named_children())
        self.fingerprint = fingerprint(module, [name for name, _ in self.children])
        self.notes: tuple[str, ...] = ()
        self.layers = tuple(self._layer(index) for index in range(len(self.children)))

    def _layer(self, index: int) -> MeasuredLayer:
        name, child = self.children[index]
        own = list(child.parameters())
        holder = next(
            (
                other
                for other, earlier in self.children[:index]
                if {id(item) for item in earlier.parameters()} & {id(item) for item in own}
            ),
            None,
        )
        return MeasuredLayer(
            name=name,
            parameters=sum(item.numel() for item in own),
            weight_bytes=float(sum(item.nbytes for item in (*own, *child.buffers()))),
            shares_weights_with=holder,
        )

    def at(self, size: int) -> SequentialChain:  # noqa: ARG002
        return self

    def inputs(self, size: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        leaf = on_device(_resized(self.example, self.example.shape[0], size), self.device, self.example.dtype)
        return [leaf], lambda leaves: self.module(*leaves)

    def piece(self, first: int, last: int) -> Piece:
        stage = nn.Sequential(*(child for _, child in self.children[first : last + 1])).train()

        def run(value: Any) -> tuple[Any, ...]:
            value = stage(value)
            return (value,) if last + 1 < len(self.children) else tuple(flatten(value)[0])

        return Piece(
            first=first,
            last=last,
            run=run,
            parameters=tuple(item for item in stage.parameters() if item.requires_grad),
            receives=(True,) if first else (),
            roots=() if first else (0,),
            overwrites=first > 0 and overwrites_input(stage),
        )

    def state(self) -> list[Tensor]:
        return _state(self.module)


class CapturedChain:
    """The layers that `bapipe.torch.capture` found, run as stages of their own."""

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

    def at(self, size: int) -> CapturedChain:
        if self.captured.dynamic or size == self.captured.batch:
            return self
        self.module.to("cpu")
        chain = CapturedChain(self.captured.at(size), device=self.device, dtype=self.dtype)
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

    def piece(self, first: int, last: int) -> Piece:
        stage = self.captured.stage(first, last, device=self.device).to(self.device)
        spec = stage.stage_spec
        return Piece(
            first=first,
            last=last,
            run=stage,
            parameters=tuple(item for item in stage.parameters() if item.requires_grad),
            receives=tuple(value.requires_grad for value in spec.received),
            roots=tuple(root.index for root in spec.roots),
            overwrites=False,
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
    children: bool | None = None,
) -> Chain:
    """The layers of a module, on the device and in the dtype; the module itself is moved there.

    `children`: take the children of an nn.Sequential, as `bapipe run` does; False: capture it as any other module;
    None: children where it is a plain nn.Sequential of one tensor. A capture is made and checked on the CPU.
    """
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if children is None:
        children = plain and len(args) == 1 and not kwargs
    if children:
        if not plain or kwargs:
            raise BaPipeError(f"only a plain nn.Sequential has children as layers, got {type(module).__name__}")
        assert isinstance(module, nn.Sequential)
        return SequentialChain(module, args, device=device, dtype=dtype)
    module = module.to(dtype=dtype)
    cpu = torch.device("cpu")
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    own_args, own_kwargs = unflatten([on_device(leaf, cpu, dtype) for leaf in leaves], spec)
    return CapturedChain(capture(module, own_args, own_kwargs), device=device, dtype=dtype)

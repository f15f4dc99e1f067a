"""A DNN as consecutive layers: what the planner moves between accelerators."""

from __future__ import annotations

from dataclasses import dataclass, field

from bapipe.errors import BaPipeError

__all__ = ["Layer", "Model", "ModelRef", "Split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a layer may be divided between two neighbouring stages."""

    channels: int
    """steps it can be divided into: output channels, vocabulary entries, directions…"""
    by: str = "output channels"

    def __post_init__(self) -> None:
        if self.channels < 2:
            raise BaPipeError(f"a layer that may be split needs at least 2 channels, got {self.channels}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer; sizes are per sample and counted in elements, so that they hold for any dtype."""

    name: str
    kind: str
    """conv, linear, lstm, embedding, attention, block, pool, …"""
    forward_flops: float
    """per sample; a multiply-add counts 2"""
    parameters: int
    output_elements: float
    """what crosses a cut after this layer, skip values included"""
    saved_elements: float
    """what the backward keeps alive, the layer's input included, parameters excluded"""
    moved_elements: float | None = None
    """read and written by the forward besides the parameters; None: input, output and saved activations"""
    error_elements: float | None = None
    """what crosses back; None: as much as output_elements (integers carry no gradient)"""
    elementwise_elements: float | None = None
    """of moved_elements, those of normalisation, activation, dropout, residual sums and pooling, which run by
    themselves after the products; None: 0"""
    weight_flops: float | None = None
    """of forward_flops, those that multiply parameters; None: all where there are parameters, else none"""
    weight_reads: float = 1.0
    """times the forward reads its parameters: 0 for a gather, about half the steps for a recurrent layer"""
    kernels: int = 1
    """matrix products of the forward that run one after another; each step of a recurrent layer counts"""
    shares_weights_with: str | None = None
    """the earlier layer that holds the same parameters (tied weights); such a layer owns none itself"""
    split: Split | None = None
    conv: tuple[int, ...] | None = None
    """(input channels, output channels, kernel, output height, output width) of a convolution, for FPGAs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Ordered layers. The `nn.Module` itself is always called `module`."""

    name: str
    layers: tuple[Layer, ...]
    input_elements: float
    """per sample, into the first layer"""
    description: str = ""

    @property
    def parameters(self) -> int:
        """Tied weights count once."""
        return sum(layer.parameters for layer in self.layers if layer.shares_weights_with is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which model a profile or plan belongs to, and how to build it again."""

    name: str
    ref: str | None = None
    """`package.module:function` returning (module, args, kwargs); None: a table only, nothing to run"""
    args: dict[str, str | int | float | bool] = field(default_factory=dict)
    fingerprint: str | None = None
    """hash of parameter names and shapes and of layer names; None where nothing was captured"""

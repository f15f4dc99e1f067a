"""Deployment: what each FPGA of a plan is built with — tiles, placement, FIFOs, links — and what it reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BoardDeployment", "Deployment", "Fifo", "LinkUse", "Module", "Placed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One resident module: the forward (FP), error (EB) or weight-gradient (WG) engine of a layer."""

    layer: str
    module: Literal["FP", "EB", "WG"]
    start: int
    """output channels from here"""
    stop: int
    """up to, not including, here"""
    of: int
    tn: int | None
    """input channels at once; None with fluid allocation, which has no tiles"""
    tm: int | None
    """output channels at once"""
    tk: int | None
    """kernel taps at once"""
    dsp: float
    """whole, but with fluid allocation"""
    cycles: float
    """per image, stalls left out"""
    efficiency: float
    """multiply-adds done over those its DSPs could do in the board's interval"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where bytes of a layer lie."""

    layer: str
    what: Literal["weights", "gradients", "features", "state"]
    where: str
    """on-chip, ddr, or the name of the board that hosts them"""
    bytes: float
    """of activations those of all images in flight"""

    @property
    def words(self) -> str:
        """`what` in the words of the glossary; files keep the paper's."""
        return "activations" if self.what == "features" else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    """A line buffer before a module."""

    layer: str
    stream: Literal["features", "errors"]
    rows: int
    """depth in rows of the stream"""
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What a board sends to a neighbour."""

    to: str
    stream: Literal["features", "errors", "parked weights"]
    image_bytes: float
    """per image"""
    rate: float
    """bytes/s"""
    bandwidth: float
    """bytes/s that the link has in this direction, or in both together if it is half duplex"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardDeployment:
    """One board. Times are seconds per image, amounts bytes."""

    accelerator: str
    type: str
    compute: float
    """C: the shortest interval that its DSPs allow"""
    ddr: float
    """D: its DDR traffic over the bandwidth"""
    ratio: float
    """ρ = D/C"""
    interval: float
    """the cluster's period over the images of a micro-batch, which all boards keep"""
    binds: str
    """what of this board comes nearest to the interval: DSP, DDR, or link to NAME"""
    dsp_forward: float
    dsp_error: float
    dsp_gradient: float
    dsp_installed: int
    efficiency: float
    """multiply-adds done over those that all installed DSPs could do in the interval"""
    ram_weights: float
    ram_gradients: float
    ram_features: float
    ram_hosted: float
    """weights of neighbours"""
    ram_buffers: float
    """FIFOs, and optimizer state where there is no DDR"""
    ram_usable: float
    ddr_used: float
    ddr_installed: float
    ddr_rate: float
    """bytes/s"""
    ddr_bandwidth: float
    modules: tuple[Module, ...]
    placed: tuple[Placed, ...]
    fifos: tuple[Fifo, ...]
    links: tuple[LinkUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """All boards of the pipeline, first stage first, and what was assumed."""

    boards: tuple[BoardDeployment, ...]
    binds: str
    """what sets the cluster's interval"""
    assumptions: dict[str, str]
    """parameter -> value and its source"""

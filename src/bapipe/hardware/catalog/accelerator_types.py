"""[types.NAME] of a cluster file, and each entry of the catalogue, -> AcceleratorType."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.hardware.cluster import LEAST_RATE, AcceleratorType, Efficiency, require_dtypes
from bapipe.units import parse_bandwidth, parse_bytes, parse_flops, parse_seconds

__all__ = ["BoardEntry", "EfficiencyEntry", "TypeEntry", "accelerator_type"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardEntry:
    """The figures of an FPGA board."""

    dsp: float
    """DSP slices"""
    on_chip_bytes: str | float | None = None
    """BRAM and URAM together; None: the sum of the two"""
    bram_bytes: str | float | None = None
    uram_bytes: str | float | None = None
    gty: float | None = None
    """GTY transceivers"""
    gtm: float | None = None
    """GTM transceivers"""
    clock: float
    """Hz"""
    macs_per_dsp_cycle: float = 1.0
    utilisation: float = 0.9
    """share of the cycles in which a DSP multiplies"""
    usable_ram: float = 0.85
    """share of the on-chip RAM that data may fill"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyEntry:
    """Assumptions of the analytic model; what is left out takes `Efficiency`'s defaults."""

    compute: dict[str, float] = field(default_factory=dict)
    memory: float = 0.8
    half_seconds: str | float = 10e-6
    launch: str | float = 30e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeEntry:
    """An accelerator type as written in TOML: quantities are texts such as "16 GB" or plain SI numbers."""

    kind: Literal["gpu", "fpga", "cpu"]
    memory: str | float
    """0: an FPGA without DDR"""
    memory_bandwidth: str | float
    flops: dict[str, str | float] = field(default_factory=dict)
    """by dtype; may be left out where `board` gives it"""
    execution: Literal["synchronous", "asynchronous"] | None = None
    """None: asynchronous for an FPGA, else synchronous"""
    link_bandwidth: str | float | None = None
    board: BoardEntry | None = None
    efficiency: EfficiencyEntry = field(default_factory=EfficiencyEntry)
    sources: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    """other names; only the catalogue has them"""


def _positive(value: float, *, what: str) -> float:
    if not value >= LEAST_RATE:
        raise FileFormatError(f"{what} must be more than 0, got {value:g}; correct it")
    return value


def _amount(value: float, kind: str, *, what: str) -> float:
    """More than 0, or 0 for an FPGA, which may do without DDR."""
    return value if kind == "fpga" and value == 0 else _positive(value, what=what)


def _share(value: float, *, what: str) -> float:
    if not LEAST_RATE <= value <= 4:
        raise FileFormatError(f"{what} must be a share such as 0.8, got {value:g}; correct it")
    return value


def _board(entry: BoardEntry, *, where: str) -> dict[str, float]:
    parts = {
        name: parse_bytes(size, what=f"{where}: {name}")
        for name, size in (("bram_bytes", entry.bram_bytes), ("uram_bytes", entry.uram_bytes))
        if size is not None
    }
    if entry.on_chip_bytes is None and not parts:
        raise FileFormatError(f"{where}: 'on_chip_bytes' is missing; add it, or bram_bytes and uram_bytes")
    total = sum(parts.values())
    on_chip = total
    if entry.on_chip_bytes is not None:
        on_chip = parse_bytes(entry.on_chip_bytes, what=f"{where}: on_chip_bytes")
    if total > on_chip * 1.01:
        raise FileFormatError(
            f"{where}: bram_bytes and uram_bytes are {total:g} together, more than on_chip_bytes, {on_chip:g}; "
            "correct one"
        )
    numbers = {
        "dsp": entry.dsp,
        "on_chip_bytes": on_chip,
        "clock": entry.clock,
        "macs_per_dsp_cycle": entry.macs_per_dsp_cycle,
        "utilisation": entry.utilisation,
        "usable_ram": entry.usable_ram,
    }
    found = {name: _positive(value, what=f"{where}: {name}") for name, value in numbers.items()}
    for share in ("utilisation", "usable_ram"):
        if found[share] > 1:
            raise FileFormatError(f"{where}: {share} is a share of at most 1, got {found[share]:g}; correct it")
    for name, count in (("gty", entry.gty), ("gtm", entry.gtm)):
        if count is not None and count < 0:
            raise FileFormatError(f"{where}: {name} must be at least 0, got {count:g}; correct it")
        if count is not None:
            found[name] = count
    return {**found, **parts}


def _flops(entry: TypeEntry, board: dict[str, float], *, where: str) -> dict[str, float]:
    require_dtypes(entry.flops, where=f"{where}: flops")
    flops = {}
    for dtype, value in entry.flops.items():
        what = f"{where}: flops: {dtype}"
        flops[dtype] = _positive(parse_flops(value, what=what), what=what)
    if not flops and board:
        flops["fp16"] = board["dsp"] * board["macs_per_dsp_cycle"] * 2 * board["clock"]
    if not flops:
        raise FileFormatError(f"{where}: 'flops' is missing; add for instance flops = {{ fp32 = \"14 TFLOPS\" }}")
    return flops


def _efficiency(entry: EfficiencyEntry, *, where: str) -> Efficiency:
    require_dtypes(entry.compute, where=f"{where}: compute")
    return Efficiency(
        compute={key: _share(value, what=f"{where}: compute: {key}") for key, value in entry.compute.items()},
        memory=_share(entry.memory, what=f"{where}: memory"),
        half_seconds=parse_seconds(entry.half_seconds, what=f"{where}: half_seconds"),
        launch=parse_seconds(entry.launch, what=f"{where}: launch"),
    )


def accelerator_type(name: str, entry: TypeEntry, *, where: str) -> AcceleratorType:
    """The type that `entry` describes; `where` names its place in errors.

    An FPGA that gives `board` but no `flops` has the peak dsp · macs_per_dsp_cycle · 2 · clock, in fp16.
    """
    if entry.board is not None and entry.kind != "fpga":
        raise FileFormatError(f'{where}: \'board\' is for kind = "fpga", got "{entry.kind}"; remove it')
    try:
        board = {} if entry.board is None else _board(entry.board, where=f"{where}: board")
        link = None
        if entry.link_bandwidth is not None:
            what = f"{where}: link_bandwidth"
            link = _positive(parse_bandwidth(entry.link_bandwidth, what=what), what=what)
        memory, rate = f"{where}: memory", f"{where}: memory_bandwidth"
        return AcceleratorType(
            name=name,
            kind=entry.kind,
            flops=_flops(entry, board, where=where),
            memory=_amount(parse_bytes(entry.memory, what=memory), entry.kind, what=memory),
            memory_bandwidth=_amount(parse_bandwidth(entry.memory_bandwidth, what=rate), entry.kind, what=rate),
            execution=entry.execution or ("asynchronous" if entry.kind == "fpga" else "synchronous"),
            link_bandwidth=link,
            efficiency=_efficiency(entry.efficiency, where=f"{where}: efficiency"),
            board=board,
            sources=entry.sources,
        )
    except FileFormatError:
        raise
    except BaPipeError as error:
        raise FileFormatError(f"{error}; correct it") from None

"""Hardware as described: accelerators, the links between them, and the cluster they form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from bapipe.errors import BaPipeError
from bapipe.io.amounts import require_amounts

__all__ = ["LEAST_RATE", "Accelerator", "AcceleratorType", "Cluster", "Efficiency", "Link", "is_fpga_cluster"]

LEAST_RATE = 1e-9
"""bytes/s, FLOP/s or a share: less is 0, because times would not be finite"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What of its peak an accelerator reaches: assumptions of the analytic cost model, on no datasheet."""

    compute: dict[str, float] = field(default_factory=dict)
    """by dtype, the share of the peak FLOP/s that a large matrix product reaches; a dtype not listed: 0.5"""
    memory: float = 0.8
    """share of the memory bandwidth that a large elementwise kernel reaches"""
    half_seconds: float = 10e-6
    """half-efficiency work size, as time: a kernel of peak FLOP/s · half_seconds reaches half of `compute`"""
    launch: float = 30e-6
    """seconds that each layer costs whatever its size, once per pass"""

    def __post_init__(self) -> None:
        for what, share in (*self.compute.items(), ("memory", self.memory)):
            if not LEAST_RATE <= share <= 4:
                raise BaPipeError(
                    f"efficiency: {what[:60]} must be a share such as 0.8, got {share:g}; correct it"
                )
        require_amounts(self, where="efficiency", todo="correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorType:
    """A model of accelerator, from the catalogue or the user."""

    name: str
    kind: Literal["gpu", "fpga", "cpu"]
    flops: dict[str, float]
    """peak FLOP/s by dtype (fp32, tf32, fp16, bf16…)"""
    memory: float
    """bytes that training may use"""
    memory_bandwidth: float
    """bytes/s"""
    execution: Literal["synchronous", "asynchronous"]
    """synchronous: sends after the compute has ended (GPU); asynchronous: while it runs (FPGA)"""
    link_bandwidth: float | None = None
    """bytes/s to a neighbour where the cluster does not say"""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """assumed, for the analytic cost model only"""
    board: dict[str, float] = field(default_factory=dict)
    """figures only an FPGA has: dsp, on_chip_bytes, clock…"""
    sources: dict[str, str] = field(default_factory=dict)
    """where each figure comes from"""

    def __post_init__(self) -> None:
        where, able = f"accelerator type '{self.name[:60]}'", self.kind == "fpga"  # which may have no DDR
        require_amounts(self, where=where, todo="correct it")
        rates = {"memory": self.memory, "memory_bandwidth": self.memory_bandwidth} if not able else {}
        for name, value in {**rates, "link_bandwidth": self.link_bandwidth, **self.flops}.items():
            if value is not None and not value >= LEAST_RATE:
                raise BaPipeError(f"{where}: {name[:60]} must be more than 0, got {value:g}; correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator of a cluster."""

    name: str
    """`node/index`"""
    type: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two accelerators."""

    bandwidth: float
    """bytes/s per direction (half duplex: of both together)"""
    latency: float = 0.0
    duplex: Literal["full", "half"] = "full"
    spread: float = 0.0
    """relative standard error of a transfer's time, as measured; 0: not known"""

    def __post_init__(self) -> None:
        if not self.bandwidth >= LEAST_RATE:
            raise BaPipeError(f"a link needs a bandwidth of more than 0, got {self.bandwidth:g}; correct it")
        if self.latency < 0:
            raise BaPipeError(f"a link needs a latency of at least 0, got {self.latency:g}; correct it")
        if not 0 <= self.spread < 1:
            raise BaPipeError(f"a link needs a spread of at least 0 and below 1, got {self.spread:g}; correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Accelerators and what connects them."""

    name: str
    accelerators: tuple[Accelerator, ...]
    types: dict[str, AcceleratorType]
    within: Link
    """between accelerators of one node"""
    between: Link | None = None
    """between nodes; None: as within"""
    pairs: dict[str, Link] = field(default_factory=dict)
    """"a/0 - a/1" -> a link that differs"""
    topology: Literal["full", "chain"] = "full"
    """chain: only neighbours in the order of `accelerators` are connected (the paper's daisy chain)"""
    collective_bandwidth: float | None = None
    """effective bytes/s per accelerator of an all-reduce; None: the slowest link's"""
    collective_overlap: float = 1.0
    """share of its rate that an all-reduce has beside a backward: less than 1 where both need the host's cores"""
    bus_bandwidth: float | None = None
    """aggregate bytes/s that all transfers within a node share; None: links are independent"""

    def __post_init__(self) -> None:
        if not self.accelerators:
            raise BaPipeError(f"cluster '{self.name}' has no accelerators; add [[accelerators]]")
        names = [accelerator.name for accelerator in self.accelerators]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BaPipeError(f"cluster '{self.name}' has two accelerators named '{twice}'; rename one")
        if not 0 <= self.collective_overlap <= 1:
            got = self.collective_overlap
            raise BaPipeError(f"an all-reduce beside a backward has 0 to 1 of its rate, got {got:g}; correct it")
        for accelerator in self.accelerators:
            if accelerator.type not in self.types:
                raise BaPipeError(f"accelerator '{accelerator.name}' is of unknown type '{accelerator.type}'")
        members = set(names)
        for key in self.pairs:
            first, _, second = key.partition(" - ")
            if first == second or not {first, second} <= members:
                raise BaPipeError(f"a link joins two accelerators of the cluster, got '{key[:60]}'; correct it")
        for name, kind in self.types.items():
            if kind.name != name:
                raise BaPipeError(f"type '{kind.name[:60]}' stands under '{name[:60]}'; give both one name")
        for rate in (self.collective_bandwidth, self.bus_bandwidth):
            if rate is not None and not rate >= LEAST_RATE:
                raise BaPipeError(
                    f"a bus or collective needs a bandwidth of more than 0, got {rate:g}; correct it"
                )

    def __len__(self) -> int:
        return len(self.accelerators)

    def type_of(self, index: int) -> AcceleratorType:
        return self.types[self.accelerators[index].type]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in order of first appearance."""
        return tuple(dict.fromkeys(accelerator.node for accelerator in self.accelerators))

    def with_links(self, changed: Callable[[Link], Link]) -> Cluster:
        """The cluster with every link as `changed` makes it; an explicit collective or bus rate stays."""
        return replace(
            self,
            within=changed(self.within),
            between=None if self.between is None else changed(self.between),
            pairs={key: changed(link) for key, link in self.pairs.items()},
        )

    def connected(self, first: int, second: int) -> bool:
        return self.topology == "full" or abs(first - second) == 1

    def link(self, first: int, second: int) -> Link:
        """The link between two accelerators, by index."""
        one, other = self.accelerators[first], self.accelerators[second]
        if self.pairs:
            for key in (f"{one.name} - {other.name}", f"{other.name} - {one.name}"):
                if key in self.pairs:
                    return self.pairs[key]
        if not self.connected(first, second):
            raise BaPipeError(f"{one.name} and {other.name} are not neighbours in the chain; reorder the stages")
        if one.node == other.node or self.between is None:
            return self.within
        return self.between


def is_fpga_cluster(cluster: Cluster) -> bool:
    """Whether every accelerator is an FPGA, so that this package plans it."""
    return all(cluster.type_of(index).kind == "fpga" for index in range(len(cluster)))

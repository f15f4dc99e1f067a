"""Hardware as described: accelerators, the links between them, and the cluster they form."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError, FileFormatError, nearest
from bapipe.io.amounts import require_amounts

__all__ = [
    "DTYPE_BYTES",
    "LEAST_RATE",
    "Accelerator",
    "AcceleratorType",
    "Cluster",
    "CollectiveRates",
    "Efficiency",
    "FsdpUnits",
    "Level",
    "Link",
    "Uplink",
    "is_fpga_cluster",
    "numbered_names",
    "require_dtypes",
    "require_node_name",
]

LEAST_RATE = 1e-9
"""bytes/s, FLOP/s or a share: less is 0, because times would not be finite"""

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""bytes of one element; tf32 is a way to multiply fp32 values"""


def require_dtypes(names: Iterable[str], *, where: str) -> None:
    """A FileFormatError unless each is a dtype that an accelerator may have a peak of."""
    for name in names:
        if name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise FileFormatError(
                f"{where}: unknown dtype '{name[:60]}'{nearest(name, DTYPE_BYTES)}; use one of {known}"
            )


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
        require_dtypes(self.compute, where="efficiency: compute")
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
        require_dtypes(self.flops, where=f"{where}: flops")
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
    groups: tuple[str, ...] = ()
    """its group at each of the cluster's levels, smallest first; "": none"""


def require_node_name(node: str, *, where: str) -> None:
    """A FileFormatError unless an accelerator can be named `node/index`, and a command line can name it."""
    if not node or "/" in node or " " in node:
        raise FileFormatError(f"{where}: node must be a name without '/' and spaces, got '{node[:60]}'; rename it")


def numbered_names(nodes: Iterable[str]) -> list[str]:
    """The names node/index of accelerators in these nodes, counted within each node."""
    counted: Counter[str] = Counter()
    names = []
    for node in nodes:
        names.append(f"{node}/{counted[node]}")
        counted[node] += 1
    return names


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

    def seconds_if_any(self, size: float) -> float:
        """Of so many bytes one way; where there are none nothing is sent."""
        return self.latency + size / self.bandwidth if size > 0 else 0.0

    def slower(self, factor: float) -> Link:
        """A link on which everything takes that factor longer."""
        return replace(self, bandwidth=self.bandwidth / factor, latency=self.latency * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """What all transfers that leave or enter a group share."""

    bandwidth: float
    """bytes/s out of the group and as much into it (half duplex: of both together)"""
    duplex: Literal["full", "half"] = "full"

    def __post_init__(self) -> None:
        if not self.bandwidth >= LEAST_RATE:
            raise BaPipeError(f"an uplink needs a bandwidth of more than 0, got {self.bandwidth:g}; correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Groups of accelerators, such as the NVLink islands, nodes, racks or sites of a cluster, all alike."""

    name: str
    over: Literal["accelerators", "nodes"] = "nodes"
    """what groups are made of: accelerators of one node, or whole nodes"""
    link: Link | None = None
    """between two accelerators whose smallest common group is of this level; None: as without the level"""
    uplink: Uplink | None = None
    """of every group; None: transfers across its edge do not share anything"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRates:
    """Bytes/s of what is sent in another way than one all-reduce at a time; None: from the all-reduce's rate.

    A rate is that of a ring: r accelerators take 2(r−1)/r of the bytes over it for an all-reduce, and half of that
    for an all-gather or a reduce-scatter.
    """

    buckets: float | None = None
    """of all-reduces of 25 MB that are queued one behind the other, as gradients are summed"""
    gather: float | None = None
    """of an all-gather"""
    scatter: float | None = None
    """of a reduce-scatter"""

    def __post_init__(self) -> None:
        for name, rate in self.known.items():
            if not rate >= LEAST_RATE:
                raise BaPipeError(f"collective: {name} must be more than 0, got {rate:g}; correct it")

    @property
    def known(self) -> dict[str, float]:
        """Those that are known, by name."""
        rates = {"buckets": self.buckets, "gather": self.gather, "scatter": self.scatter}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def slower(self, factor: float) -> CollectiveRates:
        """Each of them slower by that factor."""
        return CollectiveRates(**{name: rate / factor for name, rate in self.known.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpUnits:
    """What FSDP2 takes on CPUs for a unit of the model, with its own work on the host, as if by a link."""

    gather: Link
    """of the bytes of its weights"""
    scatter: Link
    """of the bytes of its gradients"""

    def slower(self, factor: float) -> FsdpUnits:
        """Both slower by that factor."""
        return FsdpUnits(gather=self.gather.slower(factor), scatter=self.scatter.slower(factor))


@dataclass(frozen=True, kw_only=True)
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
    collective_rates: CollectiveRates = field(default_factory=CollectiveRates)
    """of other collectives than one all-reduce at a time"""
    fsdp_units: FsdpUnits | None = None
    """what FSDP2 takes for a unit on CPUs; None: what its collectives do"""
    collective_overlap: float = 1.0
    """share of its rate that an all-reduce has beside a backward: less than 1 where both need the host's cores"""
    bus_bandwidth: float | None = None
    """aggregate bytes/s that all transfers within a node share; None: links are independent"""
    levels: tuple[Level, ...] = ()
    """groups of accelerators by which links differ, smallest first; each group lies in one of the next level"""

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
        if self.collective_rates.known and self.collective_bandwidth is None:
            raise BaPipeError(
                f"cluster '{self.name}' has rates of collectives without that of an all-reduce; add its bandwidth"
            )
        _require_levels(self)

    def __hash__(self) -> int:
        """Quickly: clusters that are compared are mostly one and the same."""
        return hash((self.name, len(self.accelerators)))

    def __len__(self) -> int:
        return len(self.accelerators)

    def type_of(self, index: int) -> AcceleratorType:
        return self.types[self.accelerators[index].type]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in order of first appearance."""
        return tuple(dict.fromkeys(accelerator.node for accelerator in self.accelerators))

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link that the cluster names: within nodes, between them, of pairs and of levels."""
        found = [self.within, self.between, *self.pairs.values(), *(level.link for level in self.levels)]
        return tuple(link for link in found if link is not None)

    @property
    def stage_links(self) -> tuple[Link, ...]:
        """The links that neighbouring stages may have, fastest first: within nodes and between, or by level.

        By level they are those of the first accelerator, with the uplinks on their way. Linear in their number.
        """
        if self.levels:
            found = {self.link(0, other) for other in range(1, len(self))} or {self.within}
            return tuple(sorted(found, key=lambda link: (-link.bandwidth, link.latency, link.duplex, link.spread)))
        return (self.within,) if self.between is None else (self.within, self.between)

    @property
    def shares_links(self) -> bool:
        """Whether two transfers may wait for each other: by the directions of a link, a bus or an uplink."""
        uplinks = any(level.uplink is not None for level in self.levels)
        return self.bus_bandwidth is not None or uplinks or any(link.duplex == "half" for link in self.links)

    @property
    def tells_places(self) -> bool:
        """Whether it matters in which node or group an accelerator is."""
        return self.between is not None or self.bus_bandwidth is not None or bool(self.levels)

    def place(self, index: int) -> tuple[str, ...]:
        """The groups of an accelerator, the largest first, its node among them."""
        return self._places[index]

    @functools.cached_property
    def _places(self) -> list[tuple[str, ...]]:
        inside = sum(level.over == "accelerators" for level in self.levels)
        return [
            (*item.groups[inside:][::-1], item.node, *item.groups[:inside][::-1]) for item in self.accelerators
        ]

    def with_links(self, changed: Callable[[Link], Link]) -> Cluster:
        """The cluster with every link as `changed` makes it; a collective's, bus's or uplink's rate stays."""
        return replace(
            self,
            within=changed(self.within),
            between=None if self.between is None else changed(self.between),
            pairs={key: changed(link) for key, link in self.pairs.items()},
            levels=tuple(
                level if level.link is None else replace(level, link=changed(level.link)) for level in self.levels
            ),
        )

    def part(self, accelerators: Sequence[Accelerator]) -> Cluster:
        """The same network with these accelerators alone, and of its pairs those among them."""
        stay = {accelerator.name for accelerator in accelerators}
        pairs = {key: link for key, link in self.pairs.items() if stay.issuperset(key.split(" - "))}
        return replace(self, accelerators=tuple(accelerators), pairs=pairs)

    def connected(self, first: int, second: int) -> bool:
        return self.topology == "full" or abs(first - second) == 1

    def link(self, first: int, second: int) -> Link:
        """The link between two accelerators, by index, as fast as the uplinks on its way let it be."""
        link = self._named_link(first, second)[1]
        if self.levels:
            least = min((uplink.bandwidth for _, uplink in self.uplinks(first, second)), default=link.bandwidth)
            return link if least >= link.bandwidth else replace(link, bandwidth=least)
        return link

    @functools.cached_property
    def link_figures(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[accelerator, accelerator] seconds per byte, and of latency, of their link; 0 where there is none.

        Made once. Quadratic in the accelerators.
        """
        rate, latency = np.zeros((2, len(self), len(self)))
        for ends in itertools.permutations(range(len(self)), 2):
            if self.connected(*ends):
                link = self.link(*ends)
                rate[ends], latency[ends] = 1 / link.bandwidth, link.latency
        return rate, latency

    def link_name(self, first: int, second: int) -> str:
        """What the link between two accelerators is called: "within", "between", a level's name, or a pair."""
        return self._named_link(first, second)[0]

    def _named_link(self, first: int, second: int) -> tuple[str, Link]:
        one, other = self.accelerators[first], self.accelerators[second]
        if self.pairs:
            for key in (f"{one.name} - {other.name}", f"{other.name} - {one.name}"):
                if key in self.pairs:
                    return key, self.pairs[key]
        if not self.connected(first, second):
            raise BaPipeError(f"{one.name} and {other.name} are not neighbours in the chain; reorder the stages")
        together = one.node == other.node
        for level, own, its in zip(self.levels, one.groups, other.groups, strict=True):
            if together and level.over == "nodes":
                break
            if level.link is not None and own == its != "":
                return level.name, level.link
        if together or self.between is None:
            return "within", self.within
        return "between", self.between

    def uplinks(self, source: int, target: int) -> Iterator[tuple[tuple[object, ...], Uplink]]:
        """The uplinks that a transfer crosses, each with what all that share it have in common."""
        one, other = self.accelerators[source], self.accelerators[target]
        for level, own, its in zip(self.levels, one.groups, other.groups, strict=True):
            if level.uplink is None or own == its:
                continue
            for group, way in ((own, "out"), (its, "in")):
                if group:
                    both = level.uplink.duplex == "half"
                    yield ("uplink", level.name, group, "both" if both else way), level.uplink


def _require_levels(cluster: Cluster) -> None:
    """Refuse levels that do not lie in one another, or that accelerators do not know."""
    if not cluster.levels:
        return
    names = [level.name for level in cluster.levels]
    if len(set(names)) < len(names) or {"", "within", "between"} & set(names):
        raise BaPipeError(f"levels need names of their own, got {', '.join(names)[:60]}; rename one")
    if cluster.topology == "chain":
        raise BaPipeError("a chain has links between neighbours alone and no levels; leave one of both out")
    inside = [level.over == "accelerators" for level in cluster.levels]
    if inside != sorted(inside, reverse=True):
        raise BaPipeError("levels over nodes come after those within nodes; reorder [[levels]]")
    around: dict[tuple[int, str], str] = {}
    """of a group at a place of the hierarchy, its group at the next"""
    for item in cluster.accelerators:
        if len(item.groups) != len(cluster.levels):
            raise BaPipeError(
                f"accelerator '{item.name[:60]}' has {len(item.groups)} groups at {len(cluster.levels)} levels; "
                "give it one for each"
            )
        rows = [*item.groups[: sum(inside)], item.node, *item.groups[sum(inside) :]]
        whole = [*names[: sum(inside)], "node", *names[sum(inside) :]]
        for place, (group, beyond) in enumerate(itertools.pairwise(rows)):
            if group and around.setdefault((place, group), beyond) != beyond:
                raise BaPipeError(
                    f"{whole[place]} '{group[:60]}' lies in two groups of level '{whole[place + 1][:60]}' or only "
                    "partly in one; groups must lie in one another"
                )


def is_fpga_cluster(cluster: Cluster) -> bool:
    """Whether every accelerator is an FPGA, so that this package plans it."""
    return all(cluster.type_of(index).kind == "fpga" for index in range(len(cluster)))

"""The one reader of clusters: a TOML file (docs/reference/cluster.md) or a shorthand such as 2xa100+2xv100."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from bapipe.errors import BaPipeError, FileFormatError, nearest
from bapipe.hardware.catalog import catalog_aliases, find_type, load_catalog
from bapipe.hardware.catalog.accelerator_types import TypeEntry, accelerator_type
from bapipe.hardware.cluster import (
    Accelerator,
    AcceleratorType,
    Cluster,
    CollectiveRates,
    FsdpUnits,
    Link,
    numbered_names,
    require_node_name,
)
from bapipe.hardware.cluster_levels import LevelEntry, joins_all, read_levels
from bapipe.hardware.link_entries import LinkEntry, read_bandwidth, read_link
from bapipe.io.decode import decode
from bapipe.io.files import load_toml, parse_toml

__all__ = [
    "CLUSTER_SCHEMA",
    "MAX_ACCELERATORS",
    "parse_cluster",
    "read_cluster",
    "with_link_bandwidth",
    "with_memory_limit",
]

CLUSTER_SCHEMA = "bapipe.cluster/1"
MAX_ACCELERATORS = 4096
"""more in one file is taken for a slip of the pen"""
_PART = re.compile(r"(?:([0-9]+)\s*[xX×*]\s*)?([A-Za-z0-9][A-Za-z0-9_.-]*)")
_SHORTHAND_NODE = "node0"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """[[accelerators]]: several of one type in one node."""

    type: str
    count: int = 1
    node: str = _SHORTHAND_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairEntry(LinkEntry):
    """[[links.pair]]."""

    between: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    within: LinkEntry | None = None
    between: LinkEntry | None = None
    pair: tuple[_PairEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """[bus]."""

    bandwidth: str | float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective(_Shared):
    """[collective]."""

    overlap: float = 1.0
    buckets: str | float | None = None
    gather: str | float | None = None
    scatter: str | float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fsdp:
    """[fsdp.gather] and [fsdp.scatter]."""

    gather: LinkEntry
    scatter: LinkEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFile:
    schema: str
    name: str
    accelerators: tuple[_Group, ...]
    topology: Literal["full", "chain"] = "full"
    types: dict[str, TypeEntry] = field(default_factory=dict)
    links: _Links = field(default_factory=_Links)
    collective: _Collective | None = None
    bus: _Shared | None = None
    fsdp: _Fsdp | None = None
    levels: tuple[LevelEntry, ...] = ()


def read_cluster(spec: str) -> Cluster:
    """The cluster that `spec` names: the path of a .toml file, or COUNTxTYPE+COUNTxTYPE… of catalogue types.

    A shorthand is one node, connected by the slowest default link among its types; FPGAs alone form a chain.
    """
    text = spec.strip()
    if text.lower().endswith(".toml") or "/" in text or "\\" in text:
        return _read_file(text)
    return _shorthand(text)


def _shorthand(spec: str) -> Cluster:
    types: list[AcceleratorType] = []
    for part in spec.split("+"):
        match = _PART.fullmatch(part.strip())
        if not match:
            raise BaPipeError(
                f"a cluster must look like 4xv100 or 2xa100+2xv100, or be a .toml file; got '{spec[:60]}'"
            )
        found = find_type(match[2])
        count = _count(int(match[1][:9]) if match[1] else 1, len(types), what=f"cluster '{spec[:60]}'")
        types += [found] * count
    distinct = {kind.name: kind for kind in types}
    return Cluster(
        name=spec,
        accelerators=_named([(kind.name, _SHORTHAND_NODE) for kind in types]),
        types=distinct,
        within=_default_link(distinct, what=f"cluster '{spec[:60]}'"),
        topology="chain" if all(kind.kind == "fpga" for kind in types) else "full",
    )


def _count(count: int, already: int, *, what: str) -> int:
    if count < 1:
        raise BaPipeError(f"{what}: a count must be at least 1, got {count}; correct it or leave the type out")
    if already + count > MAX_ACCELERATORS:
        raise BaPipeError(f"{what}: {already + count} accelerators are over the limit of {MAX_ACCELERATORS}")
    return count


def _named(members: list[tuple[str, str]]) -> tuple[Accelerator, ...]:
    """(type, node) pairs -> accelerators called node/index, counted within each node."""
    names = numbered_names(node for _, node in members)
    return tuple(
        Accelerator(name=name, type=kind, node=node) for name, (kind, node) in zip(names, members, strict=True)
    )


def _default_link(types: dict[str, AcceleratorType], *, what: str) -> Link:
    rates = []
    for kind in types.values():
        if kind.link_bandwidth is None:
            raise BaPipeError(
                f"{what}: nothing says how fast links are and type '{kind.name}' has no link_bandwidth; "
                "add [links.within] with a bandwidth"
            )
        rates.append(kind.link_bandwidth)
    return Link(bandwidth=min(rates))


def _read_file(path: str) -> Cluster:
    return _cluster(load_toml(path), path)


def parse_cluster(text: str, *, where: str) -> Cluster:
    """The cluster of a TOML text, as in a cluster file; `where` says in messages where it comes from."""
    return _cluster(parse_toml(text, where=where), where)


def _cluster(data: dict[str, Any], path: str) -> Cluster:
    found = data.get("schema")
    if found != CLUSTER_SCHEMA:
        got = "nothing" if found is None else f"'{str(found)[:60]}'"
        raise FileFormatError(f'{path}: schema must be "{CLUSTER_SCHEMA}", got {got}; correct the first line')
    entry = decode(_ClusterFile, data, where=path)
    if not entry.accelerators:
        raise FileFormatError(f"{path} has no accelerators; add [[accelerators]]")
    own = {
        name: accelerator_type(name, kind, where=f"{path}: types: {name}") for name, kind in entry.types.items()
    }
    members: list[tuple[str, str]] = []
    for index, group in enumerate(entry.accelerators):
        where = f"{path}: accelerators[{index}]"
        require_node_name(group.node, where=where)
        kind = _type_name(group.type, own, where=where)
        members += [(kind, group.node)] * _count(group.count, len(members), what=where)
    types = {kind: own[kind] if kind in own else find_type(kind) for kind, _ in members}
    levels, accelerators = read_levels(entry.levels, _named(members), path=path)
    names = [accelerator.name for accelerator in accelerators]
    within = _link(entry.links.within, where=f"{path}: links: within")
    between = _link(entry.links.between, where=f"{path}: links: between")
    nodes = dict.fromkeys(node for _, node in members)
    if between is None and levels and joins_all(levels[-1], len(levels) - 1, accelerators):
        between = levels[-1].link
    if len(nodes) > 1 and between is None:
        raise FileFormatError(
            f"{path}: {len(nodes)} nodes and no [links.between]; add it with the bandwidth between nodes"
        )
    return Cluster(
        name=entry.name,
        accelerators=accelerators,
        types=types,
        within=within or _default_link(types, what=path),
        between=between,
        pairs=_pairs(entry.links.pair, names, chain=entry.topology == "chain", path=path),
        topology=entry.topology,
        collective_bandwidth=_shared(entry.collective, where=f"{path}: collective"),
        collective_rates=_rates(entry.collective, where=f"{path}: collective"),
        fsdp_units=_fsdp_units(entry.fsdp, where=f"{path}: fsdp"),
        collective_overlap=entry.collective.overlap if entry.collective else 1.0,
        bus_bandwidth=_shared(entry.bus, where=f"{path}: bus"),
        levels=levels,
    )


def _type_name(name: str, own: dict[str, AcceleratorType], *, where: str) -> str:
    """The type's own name: of the file first, then of the catalogue or its aliases."""
    if name in own:
        return name
    known = [*own, *load_catalog(), *catalog_aliases()]
    if name.strip().lower() not in known:
        raise FileFormatError(
            f"{where}: unknown accelerator '{name[:60]}'{nearest(name, known)}; correct it or add [types.NAME]"
        )
    return find_type(name).name


def _link(entry: LinkEntry | None, *, where: str) -> Link | None:
    return None if entry is None else read_link(entry, where=where)


def _shared(entry: _Shared | None, *, where: str) -> float | None:
    return None if entry is None else read_bandwidth(entry.bandwidth, where=where)


def _rates(entry: _Collective | None, *, where: str) -> CollectiveRates:
    """Of the collectives that have a rate of their own."""
    given = {} if entry is None else {"buckets": entry.buckets, "gather": entry.gather, "scatter": entry.scatter}
    known = {
        name: read_bandwidth(rate, where=where, what=name) for name, rate in given.items() if rate is not None
    }
    return CollectiveRates(**known)


def _fsdp_units(entry: _Fsdp | None, *, where: str) -> FsdpUnits | None:
    if entry is None:
        return None
    gather = read_link(entry.gather, where=f"{where}: gather")
    return FsdpUnits(gather=gather, scatter=read_link(entry.scatter, where=f"{where}: scatter"))


def _pairs(entries: tuple[_PairEntry, ...], names: list[str], *, chain: bool, path: str) -> dict[str, Link]:
    position = {name: index for index, name in enumerate(names)}
    pairs: dict[str, Link] = {}
    for index, entry in enumerate(entries):
        where = f"{path}: links: pair[{index}]"
        if len(entry.between) != 2 or entry.between[0] == entry.between[1]:
            raise FileFormatError(
                f"{where}: between must name two different accelerators, got {list(entry.between)[:4]}; correct it"
            )
        for name in entry.between:
            if name not in position:
                raise FileFormatError(
                    f"{where}: unknown accelerator '{name[:60]}'{nearest(name, names)}; "
                    "accelerators are called node/index"
                )
        first, second = sorted(entry.between, key=position.__getitem__)
        if chain and position[second] - position[first] != 1:
            raise FileFormatError(f"{where}: {first} and {second} are no neighbours in the chain; remove the pair")
        key = f"{first} - {second}"
        if key in pairs:
            raise FileFormatError(f"{where}: {first} and {second} have two links; remove one")
        pairs[key] = read_link(entry, where=where)
    return pairs


def with_link_bandwidth(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """The cluster with every link at that bandwidth; latencies and a collective's, bus's or uplink's rate stay."""
    if not bytes_per_s > 0:
        raise BaPipeError(f"a link needs a bandwidth of more than 0, got {bytes_per_s:g}; correct it")

    return cluster.with_links(lambda link: dataclasses.replace(link, bandwidth=float(bytes_per_s)))


def with_memory_limit(cluster: Cluster, limit: float) -> Cluster:
    """The cluster whose accelerators may use at most `limit` bytes each; none gets more than it has."""
    if not limit > 0:
        raise BaPipeError(f"a memory limit must be more than 0 bytes, got {limit:g}; correct it")
    types = {
        name: dataclasses.replace(kind, memory=min(kind.memory, float(limit)))
        for name, kind in cluster.types.items()
    }
    return dataclasses.replace(cluster, types=types)

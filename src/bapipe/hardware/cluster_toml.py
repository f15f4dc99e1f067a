"""A Cluster as the TOML file that `bapipe.hardware.cluster_file` reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from bapipe.hardware.cluster import AcceleratorType, Cluster, Level, Link, numbered_names
from bapipe.io.files import toml_string

__all__ = ["cluster_toml"]


def cluster_toml(cluster: Cluster, *, comment: str = "") -> str:
    """The file's text, complete: types too, so that it needs no catalogue. Read back, it is the same cluster.

    Accelerators are named node/index in order, as the reader names them; those of a part of a cluster may have
    other names. `comment` stands before them.
    """
    cluster = _as_read(cluster)
    lines = [
        'schema = "bapipe.cluster/1"',
        f"name = {toml_string(cluster.name)}",
        f"topology = {toml_string(cluster.topology)}",
    ]
    if cluster.collective_bandwidth is not None:
        values = {"bandwidth": cluster.collective_bandwidth, "overlap": cluster.collective_overlap}
        lines += [f"collective = {_table(values | cluster.collective_rates.known)}"]
    if cluster.bus_bandwidth is not None:
        lines += [f"bus = {{ bandwidth = {cluster.bus_bandwidth!r} }}"]
    lines += ["", *(f"# {line}" for line in comment.splitlines())]
    for (kind, node), members in itertools.groupby(cluster.accelerators, key=lambda one: (one.type, one.node)):
        count = sum(1 for _ in members)
        lines += [
            "[[accelerators]]",
            f"type = {toml_string(kind)}",
            f"count = {count}",
            f"node = {toml_string(node)}",
            "",
        ]
    lines += ["[links.within]", *_link(cluster.within), ""]
    if cluster.between is not None:
        lines += ["[links.between]", *_link(cluster.between), ""]
    for key, link in cluster.pairs.items():
        ends = ", ".join(toml_string(end) for end in key.split(" - "))
        lines += ["[[links.pair]]", f"between = [{ends}]", *_link(link), ""]
    if cluster.fsdp_units is not None:
        lines += ["[fsdp.gather]", *_link(cluster.fsdp_units.gather), ""]
        lines += ["[fsdp.scatter]", *_link(cluster.fsdp_units.scatter), ""]
    for place, level in enumerate(cluster.levels):
        lines += ["[[levels]]", *_level(cluster, place, level), ""]
    for name in dict.fromkeys(accelerator.type for accelerator in cluster.accelerators):
        lines += [f"[types.{toml_string(name)}]", *_type(cluster.types[name]), ""]
    return "\n".join(lines)


def _as_read(cluster: Cluster) -> Cluster:
    """With accelerators named as the reader names them, and the link between nodes that it asks for."""
    numbered = numbered_names(item.node for item in cluster.accelerators)
    names = dict(zip((item.name for item in cluster.accelerators), numbered, strict=True))
    return replace(
        cluster,
        accelerators=tuple(replace(item, name=names[item.name]) for item in cluster.accelerators),
        between=cluster.within if cluster.between is None and len(cluster.nodes) > 1 else cluster.between,
        pairs={" - ".join(names[end] for end in key.split(" - ")): link for key, link in cluster.pairs.items()},
    )


def _table(values: Mapping[str, float | str]) -> str:
    entries = (
        f"{toml_string(key)} = {toml_string(one) if isinstance(one, str) else repr(one)}"
        for key, one in values.items()
    )
    return f"{{ {', '.join(entries)} }}"


def _link(link: Link) -> list[str]:
    lines = [
        f"bandwidth = {link.bandwidth!r}",
        f"latency = {link.latency!r}",
        f"duplex = {toml_string(link.duplex)}",
    ]
    return [*lines, f"spread = {link.spread!r}"] if link.spread else lines


def _level(cluster: Cluster, place: int, level: Level) -> list[str]:
    groups: dict[str, list[str]] = {}
    for item in cluster.accelerators:
        if item.groups[place]:
            groups.setdefault(item.groups[place], []).append(toml_string(item.name))
    members = ", ".join(f"{toml_string(group)} = [{', '.join(own)}]" for group, own in groups.items())
    lines = [
        f"name = {toml_string(level.name)}",
        f"over = {toml_string(level.over)}",
        f"members = {{ {members} }}",
    ]
    if level.link is not None:
        lines.append(f"link = {{ {', '.join(_link(level.link))} }}")
    if level.uplink is not None:
        values = {"bandwidth": level.uplink.bandwidth, "duplex": level.uplink.duplex}
        lines.append(f"uplink = {_table(values)}")
    return lines


def _type(kind: AcceleratorType) -> list[str]:
    lines = [
        f"kind = {toml_string(kind.kind)}",
        f"memory = {kind.memory!r}",
        f"memory_bandwidth = {kind.memory_bandwidth!r}",
        f"flops = {_table(kind.flops)}",
        f"execution = {toml_string(kind.execution)}",
    ]
    if kind.link_bandwidth is not None:
        lines.append(f"link_bandwidth = {kind.link_bandwidth!r}")
    own = kind.efficiency
    lines.append(
        f"efficiency = {{ compute = {_table(own.compute)}, memory = {own.memory!r}, "
        f"half_seconds = {own.half_seconds!r}, launch = {own.launch!r} }}"
    )
    if kind.board:
        lines.append(f"board = {_table(kind.board)}")
    if kind.sources:
        lines.append(f"sources = {_table(kind.sources)}")
    return lines

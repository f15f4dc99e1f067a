"""[[levels]] of a cluster file: which accelerators form a group, what joins its members and what leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bapipe.errors import FileFormatError, nearest
from bapipe.hardware.cluster import Accelerator, Level
from bapipe.hardware.link_entries import LinkEntry, UplinkEntry, read_link, read_uplink

__all__ = ["LevelEntry", "joins_all", "read_levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelEntry:
    """[[levels]]: groups by one of `size`, `nodes` and `members`."""

    name: str
    size: int | None = None
    """so many accelerators in a group, in the order of the file"""
    nodes: int | None = None
    """so many nodes in a group, likewise"""
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """group -> its nodes or accelerators"""
    over: Literal["accelerators", "nodes"] | None = None
    """None: nodes, if some group has several"""
    link: LinkEntry | None = None
    uplink: UplinkEntry | None = None


def read_levels(
    entries: Sequence[LevelEntry], accelerators: tuple[Accelerator, ...], *, path: str
) -> tuple[tuple[Level, ...], tuple[Accelerator, ...]]:
    """The levels of a file, and its accelerators with their groups at each. Linear in the accelerators."""
    levels, groups = [], []
    for index, entry in enumerate(entries):
        where = f"{path}: levels[{index}]"
        found = _groups(entry, accelerators, where=where)
        spans = len({(group, item.node) for group, item in zip(found, accelerators, strict=True)})
        several = spans > len(set(found)) or (entry.nodes or 1) > 1
        if entry.link is None and entry.uplink is None:
            raise FileFormatError(f"{where}: level '{entry.name[:60]}' has neither link nor uplink; add one")
        levels.append(
            Level(
                name=entry.name,
                over=entry.over or ("nodes" if several else "accelerators"),
                link=None if entry.link is None else read_link(entry.link, where=f"{where}: link"),
                uplink=None if entry.uplink is None else read_uplink(entry.uplink, where=f"{where}: uplink"),
            )
        )
        groups.append(found)
    if not levels:
        return (), accelerators
    placed = zip(accelerators, zip(*groups, strict=True), strict=True)
    return tuple(levels), tuple(replace(item, groups=own) for item, own in placed)


def joins_all(level: Level, place: int, accelerators: Sequence[Accelerator]) -> bool:
    """Whether the level, the `place`-th, has a link and one group of all accelerators."""
    groups = {item.groups[place] for item in accelerators}
    return level.link is not None and len(groups) == 1 and "" not in groups


def _groups(entry: LevelEntry, accelerators: Sequence[Accelerator], *, where: str) -> list[str]:
    """The group of each accelerator."""
    given = [name for name in ("size", "nodes", "members") if getattr(entry, name)]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise FileFormatError(f"{where}: give one of size, nodes and members, got {said}")
    for name in ("size", "nodes"):
        count = getattr(entry, name)
        if count is not None and count < 1:
            raise FileFormatError(f"{where}: {name} must be at least 1, got {count}; correct it")
    if entry.size is not None:
        return [f"{entry.name}{index // entry.size}" for index in range(len(accelerators))]
    nodes = list(dict.fromkeys(item.node for item in accelerators))
    if entry.nodes is not None:
        number = {node: index // entry.nodes for index, node in enumerate(nodes)}
        return [f"{entry.name}{number[item.node]}" for item in accelerators]
    known = {*nodes, *(item.name for item in accelerators)}
    group_of: dict[str, str] = {}
    for group, members in entry.members.items():
        for member in members:
            if member not in known:
                raise FileFormatError(
                    f"{where}: members: unknown node or accelerator '{member[:60]}'{nearest(member, known)}; "
                    "accelerators are called node/index"
                )
            if group_of.setdefault(member, group) != group:
                raise FileFormatError(f"{where}: members: '{member[:60]}' is in two groups; remove it from one")
    return [group_of.get(item.name) or group_of.get(item.node, "") for item in accelerators]

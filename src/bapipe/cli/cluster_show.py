"""`bapipe cluster show`: accelerators, levels and links of a cluster, as the planner takes them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import click

from bapipe.hardware.cluster import Cluster, Link
from bapipe.hardware.cluster_file import read_cluster
from bapipe.units import format_bandwidth, format_seconds

__all__ = ["show_command"]

_MOST_NAMES = 4
"""groups of a level that are named"""
_COLLECTIVES = {"buckets": "all-reduces in buckets", "gather": "all-gather", "scatter": "reduce-scatter"}


@click.command("show")
@click.argument("cluster")
def show_command(cluster: str) -> None:
    """Show what CLUSTER, a file or a shorthand, says: accelerators, levels, links and uplinks.

    \b
    Example:
      bapipe cluster show examples/cluster-racks.toml
    """
    for line in _lines(read_cluster(cluster)):
        click.echo(line)


def _lines(cluster: Cluster) -> Iterator[str]:
    nodes = f"{len(cluster.nodes)} node{'' if len(cluster.nodes) == 1 else 's'}"
    kinds = Counter(item.type for item in cluster.accelerators)
    shown = " + ".join(f"{count} × {name}" for name, count in kinds.items())
    yield f"{cluster.name}: {shown} in {nodes}, {'a chain' if cluster.topology == 'chain' else 'all connected'}"
    for place, level in enumerate(cluster.levels):
        groups = Counter(item.groups[place] for item in cluster.accelerators if item.groups[place])
        names = ", ".join(f"{name} ({count})" for name, count in itertools.islice(groups.items(), _MOST_NAMES))
        more = f" and {len(groups) - _MOST_NAMES} more" if len(groups) > _MOST_NAMES else ""
        yield f"level {level.name}: {names}{more}"
        if level.link is not None:
            yield f"  link within each: {_link(level.link)}"
        if level.uplink is not None:
            ways = "both ways together" if level.uplink.duplex == "half" else "each way"
            yield f"  uplink of each: {format_bandwidth(level.uplink.bandwidth)} {ways}, shared by all across it"
    yield f"links within nodes: {_link(cluster.within)}"
    if cluster.between is not None:
        yield f"links between nodes: {_link(cluster.between)}"
    for key, link in itertools.islice(cluster.pairs.items(), 2 * _MOST_NAMES):
        yield f"link {key}: {_link(link)}"
    if len(cluster.pairs) > 2 * _MOST_NAMES:
        yield f"and {len(cluster.pairs) - 2 * _MOST_NAMES} more pairs"
    if cluster.bus_bandwidth is not None:
        yield f"bus of each node: {format_bandwidth(cluster.bus_bandwidth)}"
    if cluster.collective_bandwidth is not None:
        yield f"all-reduce: {format_bandwidth(cluster.collective_bandwidth)} per accelerator"
    for name, rate in cluster.collective_rates.known.items():
        yield f"{_COLLECTIVES[name]}: {format_bandwidth(rate)} per accelerator"
    if cluster.fsdp_units is not None:
        units = cluster.fsdp_units
        yield f"FSDP2, a unit: gathers {_link(units.gather)}; scatters {_link(units.scatter)}"


def _link(link: Link) -> str:
    latency = f", {format_seconds(link.latency)}" if link.latency else ""
    return f"{format_bandwidth(link.bandwidth)}{latency}{', half duplex' if link.duplex == 'half' else ''}"

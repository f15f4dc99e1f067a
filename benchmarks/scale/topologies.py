"""Clusters of 64 to 4096 accelerators as they are built, each as the cluster file that a user would write."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NODE", "TOPOLOGIES", "Topology", "cluster_text"]

NODE = 8
"""accelerators of a machine"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What joins machines of eight accelerators."""

    title: str
    types: tuple[str, ...] = ("h100",)
    """of the machines, by turns"""
    within: float = 360e9
    """bytes/s between accelerators of a machine: NVLink 4"""
    between: float = 50e9
    """bytes/s between two accelerators of different machines: a 400 Gb/s card for each"""
    latency: float = 10e-6
    """seconds between machines"""
    machine: float | None = None
    """bytes/s that all accelerators of a machine share to the network; None: each has its own card"""
    pod: tuple[int, float] | None = None
    """machines of a pod, and bytes/s that they share to other pods"""


TOPOLOGIES: dict[str, Topology] = {
    "rails": Topology(title="NVLink islands of 8, a 400 Gb/s card for each accelerator (rails)"),
    "one card": Topology(title="NVLink islands of 8, one 400 Gb/s card for a machine", machine=50e9),
    "two levels": Topology(title="rails in pods of 32 machines, 8:1 between pods", pod=(32, 32 * 8 * 50e9 / 8)),
    "mixed": Topology(title="A100 and H100 machines by turns, rails of 200 Gb/s", types=("a100-80", "h100"),
                      between=25e9),
    "internet": Topology(title="machines of 8 at sites of their own, 1 Gb/s and 30 ms between sites",
                         between=125e6, latency=30e-3, machine=125e6),
}  # fmt: skip


def cluster_text(topology: Topology, count: int, *, name: str) -> str:
    """The cluster file of so many accelerators."""
    machines = count // NODE
    lines = ['schema = "bapipe.cluster/1"', f'name = "{name}"']
    for machine in range(machines):
        kind = topology.types[machine % len(topology.types)]
        lines += ["", "[[accelerators]]", f'type = "{kind}"', f"count = {NODE}", f'node = "m{machine}"']
    lines += ["", "[links.within]", f"bandwidth = {topology.within}", 'latency = "5 us"']
    lines += ["", "[links.between]", f"bandwidth = {topology.between}", f"latency = {topology.latency}"]
    if topology.machine is not None:
        lines += ["", "[[levels]]", 'name = "machine"', "nodes = 1"]
        lines += [f"uplink = {{ bandwidth = {topology.machine} }}"]
    if topology.pod is not None and machines > topology.pod[0]:
        size, rate = topology.pod
        lines += ["", "[[levels]]", 'name = "pod"', f"nodes = {size}"]
        lines += [f"link = {{ bandwidth = {topology.between}, latency = {topology.latency} }}"]
        lines += [f"uplink = {{ bandwidth = {rate} }}"]
    return "\n".join(lines) + "\n"

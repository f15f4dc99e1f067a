"""The clusters of benchmarks/scale are what their names say, and are read by the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.hardware.cluster_file import read_cluster
from loaded_files import load_file
from paths import REPOSITORY

topologies = load_file(REPOSITORY / "benchmarks" / "scale" / "topologies.py", "scale_topologies")


@pytest.mark.parametrize("name", sorted(topologies.TOPOLOGIES))
def test_a_network_is_read_as_it_is_meant(name: str, tmp_path: Path) -> None:
    topology = topologies.TOPOLOGIES[name]
    path = tmp_path / "cluster.toml"
    path.write_text(topologies.cluster_text(topology, 512, name=name))
    cluster = read_cluster(str(path))
    assert len(cluster) == 512
    assert len(cluster.nodes) == 64
    assert set(cluster.types) == set(topology.types)
    assert cluster.link(0, 1).bandwidth == topology.within
    assert cluster.link(0, 511).bandwidth == topology.between
    shared = [uplink.bandwidth for _, uplink in cluster.uplinks(0, 511)]
    assert shared == [rate for rate in (topology.machine, topology.pod and topology.pod[1]) if rate for _ in "ab"]
    within_a_pod = [uplink.bandwidth for _, uplink in cluster.uplinks(0, 9)]
    assert within_a_pod == [topology.machine] * 2 if topology.machine else within_a_pod == []

"""A written cluster reads back the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, CollectiveRates, FsdpUnits, Link
from bapipe.hardware.cluster_file import read_cluster
from bapipe.hardware.cluster_toml import cluster_toml
from paths import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples").glob("cluster-*.toml"))


def _written(cluster: Cluster, folder: Path) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(cluster_toml(cluster, comment="what\nand why"), encoding="utf-8")
    return read_cluster(str(path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    cluster = read_cluster(str(path))
    assert _written(cluster, tmp_path) == cluster


@pytest.mark.parametrize("spec", ["4xv100", "2xa100+2xv100", "2xvcu129+2xvcu118", "cpu"])
def test_a_shorthand_becomes_a_file(spec: str, tmp_path: Path) -> None:
    cluster = read_cluster(spec)
    assert _written(cluster, tmp_path) == cluster


def test_names_with_quotes_and_rates_of_its_own(tmp_path: Path) -> None:
    cluster = read_cluster("3xv100")
    kinds = {'my "fast" \\ card': replace(cluster.types["v100-16"], name='my "fast" \\ card')}
    odd = replace(
        cluster,
        name='two\nlines and "quotes" \x7f ü',
        types=kinds,
        accelerators=tuple(replace(item, type='my "fast" \\ card') for item in cluster.accelerators),
        pairs={"node0/0 - node0/2": replace(cluster.within, bandwidth=1.25e9, latency=3e-6, duplex="half")},
        collective_bandwidth=1.6e9,
        collective_rates=CollectiveRates(buckets=2.5e9, gather=1.25e9, scatter=0.75e9),
        collective_overlap=0.625,
        fsdp_units=FsdpUnits(
            gather=Link(bandwidth=1.5e9, latency=1e-3), scatter=Link(bandwidth=5e8, latency=2e-3)
        ),
        bus_bandwidth=4.8e10,
    )
    assert _written(odd, tmp_path) == odd


def test_the_spread_of_links_is_kept_and_no_spread_is_not_written(tmp_path: Path) -> None:
    cluster = read_cluster("3xv100")
    known = replace(
        cluster,
        within=replace(cluster.within, spread=0.3),
        pairs={"node0/0 - node0/2": replace(cluster.within, spread=0.1)},
    )
    assert _written(known, tmp_path) == known
    assert "spread" not in cluster_toml(cluster)


@pytest.mark.parametrize("name", ["buckets", "gather", "scatter"])
def test_each_rate_of_a_collective_is_kept_and_none_is_written_that_is_not_known(
    name: str, tmp_path: Path
) -> None:
    cluster = replace(read_cluster("3xv100"), collective_bandwidth=1e9)
    known = replace(cluster, collective_rates=CollectiveRates(**{name: 3e9}))
    assert _written(known, tmp_path) == known
    assert name in cluster_toml(known)
    assert name not in cluster_toml(cluster)


def test_a_spread_may_be_written_as_a_percentage(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = cluster_toml(read_cluster("2xv100"))
    path.write_text(text.replace("[links.within]", '[links.within]\nspread = "30%"'), encoding="utf-8")
    assert read_cluster(str(path)).within.spread == pytest.approx(0.3)
    path.write_text(text.replace("[links.within]", "[links.within]\nspread = 3"), encoding="utf-8")
    with pytest.raises(BaPipeError, match="a link needs a spread of at least 0 and below 1, got 3; correct it"):
        read_cluster(str(path))


def test_a_part_of_a_cluster_is_named_as_it_is_read(tmp_path: Path) -> None:
    cluster = read_cluster("4xv100")
    slow = replace(cluster.within, bandwidth=1e9)
    part = replace(cluster, pairs={"node0/1 - node0/3": slow}).part(cluster.accelerators[1::2])
    assert [item.name for item in part.accelerators] == ["node0/1", "node0/3"]
    written = _written(part, tmp_path)
    assert [item.name for item in written.accelerators] == ["node0/0", "node0/1"]
    assert written.pairs == {"node0/0 - node0/1": slow}


def test_nodes_that_are_joined_as_accelerators_within_them_are_written_so(tmp_path: Path) -> None:
    cluster = read_cluster("2xv100")
    first, second = cluster.accelerators
    apart = replace(cluster, accelerators=(first, replace(second, name="other/0", node="other")))
    assert apart.between is None
    assert _written(apart, tmp_path) == replace(apart, between=apart.within)

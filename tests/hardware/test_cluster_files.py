"""Clusters from shorthands and files, and what is refused in either."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.hardware.cluster_file import read_cluster, with_link_bandwidth, with_memory_limit
from paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
HEAD = 'schema = "bapipe.cluster/1"\nname = "test"\n'
ONE = '[[accelerators]]\ntype = "v100"\ncount = 2\nnode = "a"\n'
TWO = ONE + '[[accelerators]]\ntype = "a100"\nnode = "b"\n'
OWN = '[types.mine]\nkind = "gpu"\nmemory = 1e9\nmemory_bandwidth = 1e9\nflops = { fp32 = 1e12 }\n'


def read(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return read_cluster(str(file))


def members(cluster: Cluster) -> list[str]:
    return [f"{item.name} {item.type}" for item in cluster.accelerators]


def test_shorthand_of_one_type() -> None:
    cluster = read_cluster("4xv100")
    assert cluster.name == "4xv100"
    assert members(cluster) == [f"node0/{index} v100-16" for index in range(4)]
    assert cluster.within == Link(bandwidth=12e9)
    assert (cluster.between, cluster.topology) == (None, "full")


def test_bare_name_is_one() -> None:
    assert members(read_cluster("mi300x")) == ["node0/0 mi300x"]


@pytest.mark.parametrize("spec", ["2xa100+2xv100", " 2 x A100 + 2xV100 ", "2*a100-40+2×v100-16"])
def test_mixed_shorthand_has_the_slowest_link(spec: str) -> None:
    cluster = read_cluster(spec)
    assert members(cluster) == ["node0/0 a100-40", "node0/1 a100-40", "node0/2 v100-16", "node0/3 v100-16"]
    assert cluster.within.bandwidth == 12e9
    assert set(cluster.types) == {"a100-40", "v100-16"}


def test_fpgas_alone_form_a_chain() -> None:
    assert read_cluster("2xvcu129+2xvcu118").topology == "chain"
    assert read_cluster("vcu129+v100").topology == "full"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"a cluster must look like 4xv100 or 2xa100\+2xv100, or be a .toml file; got ''"),
        ("4xv100+", r"must look like"),
        ("4xv100,2xa100", r"must look like"),
        ("-1xv100", r"must look like"),
        ("0xv100", r"a count must be at least 1, got 0"),
        ("9999999999999xv100", r"over the limit of 4096"),
        ("4000xv100+97xv100", r"4097 accelerators are over the limit"),
        ("4xv1000", r"unknown accelerator 'v1000' \(did you mean 'v100"),
        ("missing.toml", r"there is no file missing.toml"),
        ("no/such/place", r"there is no file no/such/place"),
    ],
)
def test_bad_shorthands(spec: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message) as caught:
        read_cluster(spec)
    assert "\n" not in str(caught.value)


def test_example_of_four_v100() -> None:
    cluster = read_cluster(str(EXAMPLES / "cluster-4-v100.toml"))
    assert members(cluster) == [f"a/{index} v100-16" for index in range(4)]
    assert cluster.within.bandwidth == 12e9
    assert cluster.within.latency == pytest.approx(10e-6)
    assert cluster.collective_bandwidth == 1.6e9


def test_example_of_two_nodes() -> None:
    cluster = read_cluster(str(EXAMPLES / "cluster-two-nodes.toml"))
    assert members(cluster) == ["old/0 rtx3090", "old/1 rtx3090", "new/0 big", "new/1 big"]
    assert cluster.nodes == ("old", "new")
    assert cluster.types["big"].flops["fp32"] == 91e12
    assert cluster.link(0, 1).bandwidth == 45e9
    assert cluster.link(1, 2).bandwidth == pytest.approx(25e9 / 8)
    assert cluster.link(2, 3).bandwidth == 24e9
    assert cluster.bus_bandwidth == 48e9


def test_example_of_two_cpus() -> None:
    cluster = read_cluster(str(EXAMPLES / "cluster-two-cpus.toml"))
    assert cluster.name == "two-cpus"
    assert members(cluster) == ["localhost/0 cpu-core", "localhost/1 cpu-core"]


def test_example_of_an_fpga_chain() -> None:
    cluster = read_cluster(str(EXAMPLES / "cluster-fpga-chain.toml"))
    assert cluster.topology == "chain"
    assert [item.type for item in cluster.accelerators] == ["vcu129", "vcu129", "vcu118", "vcu118"]
    with pytest.raises(BaPipeError, match="not neighbours"):
        cluster.link(0, 2)


def test_file_without_links_takes_the_default(tmp_path: Path) -> None:
    cluster = read(tmp_path, HEAD + ONE)
    assert cluster.within == Link(bandwidth=12e9)
    assert members(cluster) == ["a/0 v100-16", "a/1 v100-16"]


def test_indices_count_within_a_node_over_groups(tmp_path: Path) -> None:
    groups = ONE + '[[accelerators]]\ntype = "t4"\nnode = "b"\n[[accelerators]]\ntype = "l4"\nnode = "a"\n'
    cluster = read(tmp_path, HEAD + groups + "[links.between]\nbandwidth = 1e9\n")
    assert members(cluster) == ["a/0 v100-16", "a/1 v100-16", "b/0 t4", "a/2 l4"]


def test_own_type_wins_over_the_catalogue(tmp_path: Path) -> None:
    own = OWN.replace("types.mine", "types.v100") + 'link_bandwidth = "2 GB/s"\n'
    cluster = read(tmp_path, HEAD + ONE + own)
    assert cluster.types["v100"].memory == 1e9
    assert cluster.within.bandwidth == 2e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\n' + ONE, r'schema must be "bapipe.cluster/1", got nothing'),
        ('schema = "bapipe.cluster/2"\nname = "x"\n' + ONE, r"schema must be .* got 'bapipe.cluster/2'"),
        ('schema = "bapipe.cluster/1"\n' + ONE, r"'name' is missing"),
        (HEAD, r"'accelerators' is missing"),
        (HEAD + "accelerators = []\n", r"has no accelerators"),
        (
            HEAD + ONE.replace("count", "cuont"),
            r"accelerators\[0\]: unknown key 'cuont' \(did you mean 'count'\?\)",
        ),
        (HEAD + ONE.replace("2", "0"), r"accelerators\[0\]: a count must be at least 1, got 0"),
        (HEAD + ONE.replace("2", "5000"), r"accelerators\[0\]: 5000 accelerators are over the limit"),
        (HEAD + ONE.replace("2", '"2"'), r"count: expected a whole number; got '2'"),
        (HEAD + ONE.replace('"v100"', '"v10"'), r"unknown accelerator 'v10' \(did you mean 'v100'\?\)"),
        (HEAD + ONE.replace('"a"', '"a/b"'), r"node must be a name without '/' and spaces, got 'a/b'"),
        (HEAD + ONE.replace('"a"', '""'), r"node must be a name"),
        (HEAD + 'topology = "ring"\n' + ONE, r"topology: must be one of full, chain; got 'ring'"),
        (HEAD + ONE + "[links.within]\nlatency = 0\n", r"links: within: 'bandwidth' is missing"),
        (HEAD + ONE + "[links.within]\nbandwidth = 0\n", r"links: within: bandwidth must be more than 0, got 0"),
        (
            HEAD + ONE + '[links.within]\nbandwidth = "12 GB"\n',
            r"links: within: bandwidth must look like '12 GB/s'",
        ),
        (HEAD + ONE + "[links.within]\nbandwidth = -1\n", r"bandwidth must be a finite number of at least 0"),
        (HEAD + ONE + "[links.within]\nbandwidth = nan\n", r"bandwidth: expected a text or a number; got nan"),
        (HEAD + ONE + '[links.within]\nbandwidth = 1\nduplex = "ful"\n', r"must be one of full, half; got 'ful'"),
        (HEAD + ONE + '[links.within]\nbandwidth = 1\nlatency = "5 parsec"\n', r"latency must look like '5 us'"),
        (HEAD + ONE + "[links.withn]\nbandwidth = 1\n", r"unknown key 'withn' \(did you mean 'within'\?\)"),
        (HEAD + TWO, r"2 nodes and no \[links.between\]; add it"),
        (HEAD + ONE + '[[links.pair]]\nbetween = ["a/0", "a/1"]\n', r"pair\[0\]: 'bandwidth' is missing"),
        (
            HEAD + ONE + '[[links.pair]]\nbetween = ["a/0"]\nbandwidth = 1\n',
            r"must name two different accelerators",
        ),
        (HEAD + ONE + '[[links.pair]]\nbetween = ["a/0", "a/0"]\nbandwidth = 1\n', r"two different"),
        (
            HEAD + ONE + '[[links.pair]]\nbetween = ["a/0", "a/7"]\nbandwidth = 1\n',
            r"unknown accelerator 'a/7' \(did you mean 'a/\d'\?\); accelerators are called node/index",
        ),
        (
            HEAD + ONE + 2 * '[[links.pair]]\nbetween = ["a/1", "a/0"]\nbandwidth = 1\n',
            r"pair\[1\]: a/0 and a/1 have two links",
        ),
        (
            HEAD
            + 'topology = "chain"\n'
            + ONE.replace("2", "3")
            + '[[links.pair]]\nbetween = ["a/2", "a/0"]\nbandwidth = 1\n',
            r"a/0 and a/2 are no neighbours in the chain",
        ),
        (HEAD + ONE + "[collective]\nbandwidth = 0\n", r"collective: bandwidth must be more than 0"),
        (HEAD + ONE + "[collective]\nbandwidth = 1\noverlap = 1.5\n", r"has 0 to 1 of its rate, got 1.5; correct"),
        (
            HEAD + ONE + "[collective]\nbandwidth = 1\ngather = 0\n",
            r"collective: gather must be more than 0, got 0",
        ),
        (HEAD + ONE + "[collective]\nbandwidth = 1\ngathr = 1\n", r"did you mean 'gather'"),
        (HEAD + ONE + "[collective]\nscatter = 1\n", r"bandwidth"),
        (HEAD + ONE + "[bus]\nbandwith = 1\n", r"bus: unknown key 'bandwith' \(did you mean 'bandwidth'\?\)"),
        (HEAD + ONE.replace("v100", "mine") + OWN, r"type 'mine' has no link_bandwidth; add \[links.within\]"),
        (HEAD + ONE + OWN.replace("1e9", "0"), r"types: mine: memory must be more than 0"),
        (HEAD + "[[accelerators", r"is not valid TOML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_link_bandwidth_changes_every_link() -> None:
    cluster = read_cluster(str(EXAMPLES / "cluster-two-nodes.toml"))
    changed = with_link_bandwidth(cluster, 1e9)
    assert {changed.link(0, 1).bandwidth, changed.link(1, 2).bandwidth, changed.link(2, 3).bandwidth} == {1e9}
    assert changed.link(1, 2).latency == cluster.link(1, 2).latency
    assert changed.bus_bandwidth == cluster.bus_bandwidth
    assert cluster.within.bandwidth == 24e9
    with pytest.raises(BaPipeError, match="more than 0, got 0"):
        with_link_bandwidth(cluster, 0)


def test_memory_limit_never_adds_memory() -> None:
    cluster = with_memory_limit(read_cluster("a100+v100"), 20e9)
    assert {name: kind.memory for name, kind in cluster.types.items()} == {"a100-40": 20e9, "v100-16": 16e9}
    with pytest.raises(BaPipeError, match="more than 0 bytes"):
        with_memory_limit(cluster, -1)

"""Levels of a cluster: the link between two accelerators, the uplinks on its way, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import parse_cluster, read_cluster, with_link_bandwidth
from command import bapipe
from paths import REPOSITORY

RACKS = read_cluster(str(REPOSITORY / "examples" / "cluster-racks.toml"))
NODES = "".join(f'[[accelerators]]\ntype = "v100"\ncount = 2\nnode = "{name}"\n' for name in "abcd")
HEAD = f'schema = "bapipe.cluster/1"\nname = "made"\n{NODES}'
LINKS = '[links.within]\nbandwidth = "10 GB/s"\n[links.between]\nbandwidth = "1 GB/s"\n'


def made(levels: str, *, links: str = LINKS) -> Cluster:
    return parse_cluster(HEAD + links + levels, where="made.toml")


@pytest.mark.parametrize(
    ("ends", "name", "rate", "crossed"),
    [
        ((0, 3), "island", 240e9, []),
        ((0, 4), "within", 24e9, []),
        ((0, 8), "rack", 25e9, [("machine", "machine0", "out"), ("machine", "machine1", "in")]),
        (
            (15, 16),
            "between",
            12e9,
            [
                ("machine", "machine1", "out"),
                ("machine", "machine2", "in"),
                ("rack", "rack0", "out"),
                ("rack", "rack1", "in"),
            ],
        ),
    ],
)
def test_the_smallest_common_group_says_the_link(
    ends: tuple[int, int], name: str, rate: float, crossed: list[tuple[str, str, str]]
) -> None:
    assert RACKS.link_name(*ends) == name
    assert RACKS.link(*ends).bandwidth == rate
    assert [key[1:] for key, _ in RACKS.uplinks(*ends)] == crossed
    back = [(level, group, {"out": "in", "in": "out"}[way]) for level, group, way in crossed]
    assert sorted(key[1:] for key, _ in RACKS.uplinks(*ends[::-1])) == sorted(back)  # type: ignore[type-var]


def test_links_are_as_fast_as_the_uplinks_on_their_way() -> None:
    cluster = made('[[levels]]\nname = "host"\nnodes = 1\nuplink = { bandwidth = "500 MB/s", duplex = "half" }\n')
    assert cluster.link(0, 2).bandwidth == 5e8
    assert cluster.link(0, 1).bandwidth == 1e10
    assert {key for key, _ in cluster.uplinks(0, 2)} == {key for key, _ in cluster.uplinks(2, 0)}
    assert with_link_bandwidth(cluster, 7e9).link(0, 2).bandwidth == 5e8
    assert [link.bandwidth for link in cluster.stage_links] == [1e10, 5e8]
    assert cluster.shares_links


def test_groups_by_name_and_pairs_that_differ() -> None:
    cluster = made(
        '[[links.pair]]\nbetween = ["a/0", "b/0"]\nbandwidth = "3 GB/s"\n'
        '[[levels]]\nname = "rack"\nmembers = { east = ["a", "b"], west = ["c"] }\nlink = { bandwidth = 2e9 }\n'
    )
    names = [item.name for item in cluster.accelerators]
    found = {other: cluster.link_name(0, names.index(other)) for other in ("a/1", "b/0", "b/1", "c/0", "d/0")}
    assert found == {"a/1": "within", "b/0": "a/0 - b/0", "b/1": "rack", "c/0": "between", "d/0": "between"}
    assert [item.groups for item in cluster.accelerators] == [("east",)] * 4 + [("west",)] * 2 + [("",)] * 2
    assert cluster.link_name(6, 7) == "within"


def test_a_level_that_joins_all_needs_no_links_between() -> None:
    within = '[links.within]\nbandwidth = "10 GB/s"\n'
    site = '[[levels]]\nname = "site"\nnodes = 4\nlink = { bandwidth = "2 GB/s" }\n'
    assert made(site, links=within).link(0, 7).bandwidth == 2e9
    with pytest.raises(BaPipeError, match=r"no \[links.between\]"):
        made(site.replace("nodes = 4", "nodes = 2"), links=within)


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ('name = "x"\nsize = 2\n', "neither link nor uplink"),
        ('name = "x"\nlink = { bandwidth = 1 }\n', "give one of size, nodes and members, got none"),
        ('name = "x"\nsize = 2\nnodes = 1\nlink = { bandwidth = 1 }\n', "got size and nodes"),
        ('name = "x"\nsize = -1\nlink = { bandwidth = 1 }\n', "size must be at least 1"),
        ('name = "x"\nsize = 3\nlink = { bandwidth = 1 }\n', "must lie in one another"),
        ('name = "x"\nsize = 2\nlink = { bandwidth = 0 }\n', "bandwidth must be more than 0"),
        ('name = "within"\nsize = 2\nlink = { bandwidth = 1 }\n', "names of their own"),
        ('name = "x"\nmembers = { y = ["e"] }\nlink = { bandwidth = 1 }\n', "unknown node or accelerator 'e'"),
        ('name = "x"\nmembers = { y = ["a"], z = ["a"] }\nlink = { bandwidth = 1 }\n', "in two groups"),
        (
            'name = "x"\nmembers = { y = ["a", "b/0"] }\nlink = { bandwidth = 1 }\n',
            "groups must lie in one another",
        ),
        ('name = "x"\nsize = 2\nlnk = { bandwidth = 1 }\n', "unknown key 'lnk'"),
    ],
)
def test_what_is_refused(level: str, said: str) -> None:
    with pytest.raises(BaPipeError, match=said):
        made(f"[[levels]]\n{level}")


def test_levels_go_from_small_to_large_and_not_with_chains() -> None:
    levels = RACKS.levels
    with pytest.raises(BaPipeError, match="levels over nodes come after"):
        replace(RACKS, levels=(levels[2], *levels[:2]))
    with pytest.raises(BaPipeError, match="a chain has"):
        replace(RACKS, topology="chain")
    with pytest.raises(BaPipeError, match="0 groups at 3 levels"):
        replace(RACKS, accelerators=tuple(replace(item, groups=()) for item in RACKS.accelerators))


def test_the_command_shows_levels_and_uplinks() -> None:
    shown = bapipe("cluster", "show", str(REPOSITORY / "examples" / "cluster-racks.toml"))
    assert shown.returncode == 0
    for line in (
        "two racks: 32 × a100-80 in 4 nodes, all connected",
        "level island: island0 (4), island1 (4), island2 (4), island3 (4) and 4 more",
        "  uplink of each: 25 GB/s each way, shared by all across it",
        "links between nodes: 12 GB/s, 30 µs",
    ):
        assert line in shown.stdout

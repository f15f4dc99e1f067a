"""PipeDream's graph.txt: what is alive across each cut of a DAG put in a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapipe.costs.pipedream_graph import read_pipedream_graph, scaled_profile
from bapipe.costs.profile import CostTable, Profile
from bapipe.errors import BaPipeError
from paths import REPOSITORY
from pipedream_profiles import published_profile

SMALL = REPOSITORY / "tests" / "data" / "small.graph.txt"


def table(profile: Profile) -> CostTable:
    return profile.accelerators["v100-16"]


def node(number: int, *, forward: float = 1, size: str = "8", weights: float = 0, what: str = "Op") -> str:
    return (
        f"node{number} -- {what} -- forward_compute_time={forward}, backward_compute_time={forward}, "
        f"activation_size={size}, parameter_size={weights}\n"
    )


def read(tmp_path: Path, text: str) -> Profile:
    file = tmp_path / "made.graph.txt"
    file.write_text(text, encoding="utf-8")
    return read_pipedream_graph(file, batch=1)


def test_small_graph() -> None:
    """Input -> Linear -> item -> ReLU -> Linear -> Linear + ReLU's output -> mask, which reads a second input."""
    profile = read_pipedream_graph(SMALL, batch=4)
    costs = table(profile)
    assert [layer.name for layer in profile.layers] == [
        "node2 Linear", "node4 ReLU", "node5 Linear", "node10 Linear", "node12 Mask",
    ]  # fmt: skip
    assert [layer.parameters for layer in profile.layers] == [220, 0, 630, 620, 0]
    assert costs.microbatches == (4,)
    assert costs.forward == (pytest.approx((1e-3, 0.5e-3, 3e-3, 3e-3, 0.25e-3)),)
    assert costs.backward == (pytest.approx((2e-3, 0.5e-3, 6e-3, 5e-3, 0.25e-3)),)
    assert costs.boundary_forward == ((216.0, 216.0, 516.0, 216.0, 0.0),)
    assert costs.boundary_backward == ((200.0, 200.0, 500.0, 200.0, 0.0),)
    assert costs.saved_activations == ((100.0, 0.0, 224.0, 500.0, 200.0),)
    assert costs.update == (0.0,) * 5
    assert profile.input_bytes == 116 / 4
    assert (profile.model.name, profile.dtype) == ("small", "fp32")


def test_labels_say_where_it_comes_from() -> None:
    costs = table(read_pipedream_graph(SMALL))
    assert costs.source == "measured"
    assert costs.microbatches == (128,)
    assert "PipeDream's published profile small.graph.txt" in costs.description
    assert "batch 128, assumed as the file does not say it" in costs.description
    assert "assumed" not in table(read_pipedream_graph(SMALL, batch=128)).description


@pytest.mark.parametrize(("batch", "side"), [(64, 112), (128, 55), (256, 224)])
def test_the_batch_of_a_convolutional_network_is_inferred(tmp_path: Path, batch: int, side: int) -> None:
    convolution = node(1, size=str(4 * batch * 64 * side**2), weights=4, what="Conv2d(3, 64, kernel_size=(7, 7))")
    linear = "Linear(in_features=64, out_features=1000, bias=True)"
    text = convolution + node(2, size=str(4 * batch * 1000), weights=4, what=linear) + "\tnode1 -- node2\n"
    file = tmp_path / "made.graph.txt"
    file.write_text(text, encoding="utf-8")
    costs = table(read_pipedream_graph(file))
    assert costs.microbatches == (batch,)
    assert f"batch {batch}, as its activations have it" in costs.description
    file.write_text(text.replace(linear, "Linear(in_features=64, out_features=999, bias=True)"), encoding="utf-8")
    assert "batch 128, assumed as the file does not say it" in table(read_pipedream_graph(file)).description


def test_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    lines = SMALL.read_text(encoding="utf-8").splitlines()
    turned = read(tmp_path, "\n".join(reversed(lines)))
    assert table(turned).boundary_forward == table(read_pipedream_graph(SMALL, batch=1)).boundary_forward


def test_a_value_with_two_readers_counts_once(tmp_path: Path) -> None:
    text = node(1, weights=4) + node(2, size="2") + node(3, size="4") + "\tnode1 -- node2\n\tnode1 -- node3\n"
    assert table(read(tmp_path, text + "\tnode2 -- node3\n")).boundary_forward == ((8.0, 10.0, 0.0),)


def test_node_numbers_yield_to_the_edges(tmp_path: Path) -> None:
    text = node(1, weights=4) + node(9) + node(5) + "\tnode1 -- node9\n\tnode9 -- node5\n"
    assert [layer.name for layer in read(tmp_path, text).layers] == ["node1 Op", "node9 Op", "node5 Op"]


def test_input_that_is_read_late_crosses_forward_only(tmp_path: Path) -> None:
    text = node(1, forward=0, size="5", what="Input") + node(2, weights=4) + node(3) + node(4)
    costs = table(
        read(tmp_path, text + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode1 -- node4\n")
    )
    assert costs.boundary_forward == ((13.0, 13.0, 0.0),)
    assert costs.boundary_backward == ((8.0, 8.0, 0.0),)


def test_stage_ids_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    text = "\n" + node(1, weights=4).rstrip() + " -- stage_id=3\n\n" + node(2) + "\tnode1 -- node2"
    assert len(read(tmp_path, text).layers) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no nodes; is it a PipeDream graph.txt\?"),
        ("hello\n", r"line 1: expected a node such as 'node1', got 'hello'"),
        (node(1) + "node2 -- Op\n", r"line 2: expected 'nodeK -- description -- times and sizes'"),
        (
            node(1).replace("forward", "foward"),
            r"line 1: unknown entry 'foward_compute_time' \(did you mean 'forward_",
        ),
        (node(1).replace(", parameter_size=0", ""), r"line 1: 'parameter_size' is missing"),
        (node(1, size="[1; two]"), r"line 1: activation_size is not a number: '\[1; two\]'"),
        (node(1, size="[1; 2"), r"line 1: activation_size is not a number"),
        (node(1, size="-3"), r"line 1: activation_size must be finite and at least 0, got '-3'"),
        (node(1, size="nan"), r"line 1: activation_size must be finite"),
        (node(1) + node(1), r"line 2: node1 is there twice"),
        (node(1) + "\tnode1 -- node7\n", r"line 2: node7 is no node of this file"),
        (node(1) + "\tnode1\n", r"line 2: expected an edge 'nodeA -- nodeB', got 'node1'"),
        (node(1) + "\tnode1 -- x\n", r"line 2: expected an edge"),
        (node(1) + node(2) + "\tnode1 -- node2\n\tnode2 -- node1\n", r"form a circle through or before node1"),
        (node(1) + "\tnode1 -- node1\n", r"form a circle through or before node1"),
        (node(1, forward=0, what="Input"), r"has inputs but no layers"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_bad_batch() -> None:
    with pytest.raises(BaPipeError, match="batch of a profile must be at least 1, got 0"):
        read_pipedream_graph(SMALL, batch=0)


def test_scaling() -> None:
    profile = read_pipedream_graph(SMALL, batch=4)
    scaled = scaled_profile(profile, [9, 4, 1])
    costs, base = table(scaled), table(profile)
    assert costs.microbatches == (1, 4, 9)
    assert costs.source == "analytic"
    assert "scaled from batch 4" in costs.description
    for row, factor in zip(costs.forward, (2 / 5, 1, 10 / 5), strict=True):
        assert row == pytest.approx([value * factor for value in base.forward[0]])
    for row, factor in zip(costs.saved_activations, (1 / 4, 1, 9 / 4), strict=True):
        assert row == pytest.approx([value * factor for value in base.saved_activations[0]])
    assert costs.boundary_backward[0] == pytest.approx([value / 4 for value in base.boundary_backward[0]])
    assert costs.update == base.update
    assert table(profile).source == "measured"
    with pytest.raises(BaPipeError, match=r"must be at least 1, got \[0\]"):
        scaled_profile(profile, [0])


def test_published_vgg16() -> None:
    profile = published_profile("vgg16", batch=128)
    assert sum(layer.parameters for layer in profile.layers) == 138_357_544
    assert sum(table(profile).forward[0]) == pytest.approx(0.2339, abs=1e-4)
    assert profile.layers[0].name == "node2 Conv2d"
    boundary = dict(zip((layer.name for layer in profile.layers), table(profile).boundary_forward[0], strict=True))
    assert boundary["node32 MaxPool2d"] == 128 * 25088 * 4
    assert table(profile).boundary_backward[0] == pytest.approx(table(profile).boundary_forward[0])


def test_published_resnet50() -> None:
    profile = published_profile("resnet50", batch=128)
    assert sum(layer.parameters for layer in profile.layers) == 25_557_032
    boundary = dict(zip((layer.name for layer in profile.layers), table(profile).boundary_forward[0], strict=True))
    skip, narrow = 128 * 256 * 56**2 * 4, 128 * 64 * 56**2 * 4
    assert boundary["node17 ReLU"] == skip
    assert boundary["node18 Conv2d"] == narrow + skip
    per_image = sum(table(profile).saved_activations[0]) / 128 / 4
    assert per_image == pytest.approx(21.5e6, rel=0.03)


def test_published_gnmt() -> None:
    profile = published_profile("gnmt", batch=32)
    size = 32 * 48 * 1024 * 4
    boundary = dict(zip((layer.name for layer in profile.layers), table(profile).boundary_forward[0], strict=True))
    assert boundary["node7 LSTM"] == size
    assert boundary["node10 Dropout"] == 2 * size
    assert boundary["node21 Embedding"] == 2 * size
    assert len(profile.layers) == 17


@pytest.mark.parametrize(("sizes", "crosses"), [((80, 10, 40), 10), ((10, 80, 40), 10), ((40, 40, 8), 8)])
def test_nodes_of_no_time_go_with_the_neighbour_by_which_least_crosses(
    tmp_path: Path, sizes: tuple[int, int, int], crosses: int
) -> None:
    """Op -> free -> free -> Op: one place to cut, after the smallest value."""
    nodes = [node(number + 1, forward=float(number == 0), size=str(size)) for number, size in enumerate(sizes)]
    text = "".join([*nodes, node(4), *(f"\tnode{number} -- node{number + 1}\n" for number in (1, 2, 3))])
    profile = read(tmp_path, text)
    assert [layer.name for layer in profile.layers] == ["node1 Op", "node4 Op"]
    assert table(profile).boundary_forward == ((crosses, 0.0),)


def test_the_row_of_a_branched_graph_is_chosen_for_the_pipeline(tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 5 and 1 -> 4 -> 5: two stages are even with 4 in the first."""
    times = {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0, 5: 1.0}
    edges = "".join(f"\tnode{a} -- node{b}\n" for a, b in ((1, 2), (2, 3), (3, 5), (1, 4), (4, 5)))
    text = "".join(node(number, forward=value) for number, value in times.items()) + edges
    assert [layer.name[:5] for layer in read(tmp_path, text).layers] == [f"node{index}" for index in range(1, 6)]
    chosen = read_pipedream_graph(tmp_path / "made.graph.txt", batch=1, pipeline=(2, 1e12))
    assert {layer.name[:5] for layer in chosen.layers[:3]} == {"node1", "node2", "node4"}
    assert "in another order than by number" in table(chosen).description
    assert "order" not in table(read_pipedream_graph(tmp_path / "made.graph.txt", pipeline=(1, 1e12))).description

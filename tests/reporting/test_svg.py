"""SVG drawings: well-formed, self-contained, one titled rectangle per action."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bapipe.errors import BaPipeError
from bapipe.reporting.drawing import timeline_svg as module
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.labels import action_name
from bapipe.reporting.drawing.timeline_svg import render_svg
from bapipe.schedule.actions import Kind
from bapipe.schedule.generators import make_schedule, with_recompute, with_update
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline
from made_timelines import dense, predicted

SVG = "{http://www.w3.org/2000/svg}"


def replicated() -> Timeline:
    schedule = with_update(with_recompute(make_schedule("1f1b-sno", 3, 6, replicas=[2, 1, 1])))
    return simulate(schedule, Costs.of(3, forward=1, backward=2, transfer=0.5, all_reduce=3, update=1))


def titled(root: ElementTree.Element, tag: str) -> list[tuple[ElementTree.Element, str]]:
    found = ((element, element.find(f"{SVG}title")) for element in root.iter(f"{SVG}{tag}"))
    return [(element, title.text or "") for element, title in found if title is not None]


CASES = {
    "gpipe": predicted("gpipe", 3, 5),
    "1f1b-sno": predicted("1f1b-sno", 4, 8, transfer=0.5),
    "fbp-as": predicted("fbp-as", 3, 5),
    "interleaved": predicted("interleaved", 4, 8, transfer=0.25),
    "zb-h2": predicted("zb-h2", 4, 8),
    "replicated": replicated(),
}


@pytest.mark.parametrize("name", CASES)
def test_one_titled_rectangle_per_action(name: str) -> None:
    timeline = CASES[name]
    rects = titled(ElementTree.fromstring(render_svg(timeline, title=name)), "rect")
    expected = sorted(action_name(timeline, index) for index in range(len(timeline.kinds)))
    assert sorted(title.split(" on ")[0] for _, title in rects) == expected


@pytest.mark.parametrize("name", CASES)
def test_everything_lies_within_the_page_and_lanes_do_not_overlap(name: str) -> None:
    root = ElementTree.fromstring(render_svg(CASES[name], title=name, width=700))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lanes: dict[float, list[tuple[float, float]]] = {}
    for rect, _ in titled(root, "rect"):
        x, y, wide, high = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + wide <= width
        assert y + high <= height
        lanes.setdefault(y, []).append((x, x + wide))
    for spans in lanes.values():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0] + 0.02
    for element in root.iter(f"{SVG}line"):
        assert all(0 <= float(element.attrib[key]) <= max(width, height) for key in ("x1", "y1", "x2", "y2"))


def test_rectangles_are_to_scale() -> None:
    root = ElementTree.fromstring(render_svg(predicted("gpipe", 2, 3)))
    by_name = {title.split(" on ")[0]: rect.attrib for rect, title in titled(root, "rect")}
    forward, backward = (float(by_name[name]["width"]) for name in ("0F0", "0B0"))
    assert backward == pytest.approx(2 * forward, abs=0.02)
    assert float(by_name["1F0"]["x"]) == pytest.approx(float(by_name["0F1"]["x"]), abs=0.02)


def test_titles_tell_action_row_and_times() -> None:
    drawn = render_svg(simulate(make_schedule("fbp-as", 2, 1), Costs.of(2, forward=1, backward=2)), unit="s")
    assert "<title>0F0 on rank 0 forward: 0 to 1 s</title>" in drawn
    assert "<title>0B0 on rank 0 backward: 4 s to 6 s</title>" in drawn


def test_kinds_differ_without_colour() -> None:
    root = ElementTree.fromstring(render_svg(replicated()))
    patterns = {pattern.attrib["id"]: pattern.find(f"{SVG}g") for pattern in root.iter(f"{SVG}pattern")}
    marks = {name: ElementTree.tostring(group) for name, group in patterns.items() if group is not None}
    assert len(set(marks.values())) == len(marks) == len({Kind.F, Kind.B, Kind.R, Kind.A, Kind.U})
    labels = {text.text for text in root.iter(f"{SVG}text") if text.attrib.get("class", "").startswith("label")}
    assert {"F0", "B5", "R3", "A", "U"} <= labels


def test_transfers_and_waiting_are_drawn_once_each() -> None:
    timeline = predicted("1f1b-sno", 3, 4, transfer=0.5)
    root = ElementTree.fromstring(render_svg(timeline))
    assert len(titled(root, "line")) == len(timeline.transfers) == 16
    assert any("waits for a transfer" in title for _, title in titled(root, "path"))
    instant = ElementTree.fromstring(render_svg(predicted("1f1b-sno", 3, 4)))
    assert not titled(instant, "line")


@pytest.mark.parametrize(
    "title",
    ["</title><script>alert(1)</script>", "a & b < c > d", "\"quoted\" 'twice'", "]]>", "\x00\x1b[31m\ud800￾\n"],
)
def test_hostile_titles_are_escaped(title: str) -> None:
    drawn = render_svg(predicted("gpipe", 2, 2), title=title)
    root = ElementTree.fromstring(drawn.encode())
    assert not list(root.iter(f"{SVG}script"))
    heading = root.find(f"{SVG}title")
    assert heading is not None
    assert (heading.text or "") == "".join(c if c.isprintable() else " " for c in title)


def test_hostile_units_are_escaped() -> None:
    assert not list(ElementTree.fromstring(render_svg(predicted("gpipe", 2, 2), unit="<b>")).iter(f"{SVG}b"))


def test_nothing_from_elsewhere() -> None:
    drawn = render_svg(CASES["replicated"], title="t")
    assert not re.search(r"script|href|@import|https?://(?!www\.w3\.org/2000/svg\")", drawn)
    assert set(re.findall(r"url\(([^)]*)\)", drawn)) == {f"#bapipe-{kind.name}" for kind in LOOKS}


def test_too_many_actions_are_merged_into_shares() -> None:
    timeline = dense(64, 1024)
    drawn = render_svg(timeline, title="dense")
    root = ElementTree.fromstring(drawn)
    assert len(drawn) < 2_000_000
    assert not titled(root, "rect")
    titles = [title for _, title in titled(root, "path")]
    assert len(titles) == 64 * 2
    assert titles[:2] == ["rank 0: forward, 1024 actions", "rank 0: backward, 1024 actions"]
    assert "131072 actions, too many to draw: heights are shares of the time" in drawn


def test_merged_shares_cover_the_busy_area() -> None:
    timeline = predicted("1f1b-sno", 4, 8)
    root = ElementTree.fromstring(render_svg(timeline, max_rects=1))
    lane = next(rect for rect in root.iter(f"{SVG}rect") if rect.attrib.get("class") == "lane")
    whole = float(lane.attrib["width"]) * float(lane.attrib["height"])
    areas = [_area(path.attrib["d"]) / whole for path, _ in titled(root, "path")]
    expected = [value / timeline.makespan for _ in range(4) for value in (8.0, 16.0)]
    assert areas == pytest.approx(expected, abs=0.01)


def _area(data: str) -> float:
    """Of a path of M, H, V and z, by the shoelace formula."""
    x = y = 0.0
    points = []
    for command, value in re.findall(r"([MHV])([-0-9.,e]+)", data):
        if command == "M":
            x, y = (float(part) for part in value.split(","))
        elif command == "H":
            x = float(value)
        else:
            y = float(value)
        points.append((x, y))
    following = points[1:] + points[:1]
    return abs(sum(a * d - b * c for (a, b), (c, d) in zip(points, following, strict=True))) / 2


def test_an_empty_timeline_is_a_page() -> None:
    empty = dense(2, 0)
    root = ElementTree.fromstring(render_svg(empty, title="none"))
    assert not titled(root, "rect")


def test_many_ranks_get_thin_rows() -> None:
    root = ElementTree.fromstring(render_svg(dense(1000, 2)))
    assert float(root.attrib["height"]) < 9000


def test_too_narrow() -> None:
    with pytest.raises(BaPipeError, match="at least 300, got 100"):
        render_svg(predicted("gpipe", 2, 2), width=100)


def test_exports() -> None:
    assert set(module.__all__) == {"MIN_SVG_WIDTH", "render_svg"}

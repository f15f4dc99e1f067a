"""The report in a real browser answers to pointer and keys, and says what the plan says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapipe.units import format_bytes, format_seconds, format_throughput
from report_plans import planned

Open = Callable[[Path], Any]
VIEW = "const v = bapipe.view; "
WINDOW = VIEW + "return [v.from, v.to];"


def place_of(page: Any, stage: int, kind: int, microbatch: int) -> tuple[float, float]:
    """The middle of an action of the first timeline, in pixels of the view's box."""
    found = page.script(
        VIEW + "const t = v.timelines[0], [s, k, m] = arguments;"
        "const i = t.kind.findIndex((each, i) => each === k && t.stage[i] === s && t.microbatch[i] === m);"
        "const item = v.itemOf(t, i); return [v.x((t.start[i] + t.finish[i]) / 2), item.y + item.h / 2];",
        stage,
        kind,
        microbatch,
    )
    return found[0], found[1]


def point_at(page: Any, x: float, y: float, *, click: bool = False, drag: float = 0.0) -> None:
    """The mouse, through the browser's own input."""
    left, top = page.script(
        "const box = bapipe.view.box; box.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const r = box.getBoundingClientRect(); return [r.left, r.top];"
    )
    place = {"x": left + x, "y": top + y}

    def mouse(kind: str, **more: object) -> None:
        page.chrome.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **place, **more})

    mouse("mouseMoved")
    if click or drag:
        button = {"button": "left", "buttons": 1, "clickCount": 1}
        mouse("mousePressed", **button)
        if drag:
            place["x"] += drag
            mouse("mouseMoved", **button)
        mouse("mouseReleased", **button)
    page.settle()


def press(page: Any, key: str) -> None:
    page.script("bapipe.view.box.focus();")
    text = {"text": key} if len(key) == 1 else {}
    for kind in ("keyDown", "keyUp"):
        values = {"type": kind, "key": key, **(text if kind == "keyDown" else {})}
        page.chrome.execute_cdp_cmd("Input.dispatchKeyEvent", values)
    page.settle()


def test_its_numbers_are_those_of_the_file(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    plan = json.loads((straight.parent / "plan.json").read_text(encoding="utf-8"))

    def figure(key: str) -> tuple[float, str]:
        found = page.script(
            "const d = document.querySelector(arguments[0]); return [Number(d.value), d.innerText];",
            f"#figure-{key} data",
        )
        return found[0], found[1]

    prediction = plan["prediction"]
    assert figure("time") == (prediction["time"], format_seconds(prediction["time"]))
    assert figure("lower_bound") == (prediction["lower_bound"], format_seconds(prediction["lower_bound"]))
    assert figure("gap") == (prediction["gap"], f"{prediction['gap']:.1%}")
    assert figure("throughput") == (prediction["throughput"], format_throughput(prediction["throughput"]))
    cells = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".map(row => [...row.querySelectorAll('data')].map(d => d.innerText));"
    )
    rows = page.script(cells, "#memory-table tbody tr")
    assert [row[0] for row in rows] == [format_bytes(stage["memory_bytes"]) for stage in plan["stages"]]
    rows = page.script(cells, "#stages-table tbody tr")
    assert [row[:2] for row in rows] == [
        [format_seconds(stage["forward"]), format_seconds(stage["backward"])] for stage in plan["stages"]
    ]
    rows = page.script(cells, "#alternatives-table tbody tr")
    assert len(rows) == 1 + len(plan["alternatives"])


def test_the_script_formats_times_as_python_does(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    values = [1.0, 0.99996, 0.0153, 2000.0, 1234567.0, 1e-9, 4.9999e-4, 0.1, 12.345, 999.4, 3e-10]
    shown = page.script("return arguments[0].map(value => bapipe.formatTime(value, 's'));", values)
    assert shown == [format_seconds(value) for value in values]


def test_pointing_tells_what_it_is(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    plan, _ = planned("straight")
    point_at(page, *place_of(page, 2, 0, 3))
    tip = page.script("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText;")
    first, where, times, *_ = tip.split("\n")
    assert first == "2F3: forward of micro-batch 3, stage 2"
    assert where == "rank 2"
    assert times.endswith(f": {format_seconds(plan.stages[2].forward)}")
    assert page.script("return document.getElementById('readout').innerText;").startswith("2F3: forward")


def test_pointing_at_a_gap_tells_of_the_bubble(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    x, y = page.script(VIEW + "const item = v.rows[3]; return [v.left + 3, item.y + item.h / 2];")
    point_at(page, x, y)
    tip = page.script("return document.getElementById('tip').innerText;")
    assert tip.startswith("bubble on rank 3\n0 to ")
    assert "idle for " in tip


def test_a_click_follows_a_microbatch_over_all_stages(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    before = page.script("return bapipe.view.canvas.toDataURL();")
    point_at(page, *place_of(page, 1, 0, 2), click=True)
    assert page.script(VIEW + "return [v.selected, v.box.dataset.selected, v.field.value];") == [2, "2", "2"]
    assert page.script("return bapipe.view.canvas.toDataURL();") != before
    # Its four forwards and four backwards keep their colour, the rest fades.
    colours = [
        page.script(
            VIEW + "const [x, y] = arguments, r = v.canvas.width / v.width;"
            "return [...v.context.getImageData(x * r, (y + 3) * r, 1, 1).data];",
            *place_of(page, stage, kind, microbatch),
        )
        for stage, kind, microbatch in ((0, 0, 2), (3, 0, 2), (0, 0, 4))
    ]
    assert colours[0] == colours[1] == [0x56, 0xB4, 0xE9, 255]
    assert min(colours[2][:3]) > 0xB4
    press(page, "Escape")
    assert page.script(VIEW + "return v.selected;") is None
    typed = "const f = bapipe.view.field; f.value = arguments[0]; f.dispatchEvent(new Event('input'));"
    page.script(typed, 5)
    assert page.script(VIEW + "return v.selected;") == 5
    page.script(typed, 999)
    assert page.script(VIEW + "return v.selected;") is None


def test_it_zooms_and_pans(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    low, high = page.script(WINDOW)
    for way in ("document.getElementById('zoom-in').click();", None):
        if way:
            page.script(way)
            page.settle()
        else:
            press(page, "+")
        start, end = page.script(WINDOW)
        assert end - start < high - low
    span = end - start
    press(page, "ArrowRight")
    moved = page.script(WINDOW)
    assert moved[0] > start
    assert moved[1] - moved[0] == pytest.approx(span)
    x, y = page.script(VIEW + "return [(v.left + v.right) / 2, v.rows[0].y + 5];")
    point_at(page, x, y, drag=120.0)
    dragged = page.script(WINDOW)
    assert moved[0] - dragged[0] == pytest.approx(120 * span / page.script(VIEW + "return v.right - v.left;"))
    before, after = page.script(
        VIEW + "const r = v.box.getBoundingClientRect(), clientX = Math.round(r.left + 400), x = clientX - r.left;"
        "const before = v.time(x), turn = {deltaY: -200, ctrlKey: true, clientX, cancelable: true};"
        "v.box.dispatchEvent(new WheelEvent('wheel', turn)); return [before, v.time(x)];"
    )
    assert after == pytest.approx(before)
    zoomed = page.script(WINDOW)
    assert zoomed[1] - zoomed[0] < span
    for _ in range(60):
        page.script("bapipe.view.zoom(4);")
    page.settle()
    assert page.script(VIEW + "return v.to > v.from;")
    press(page, "0")
    assert page.script(WINDOW) == [low, high]
    for _ in range(3):
        press(page, "ArrowLeft")
    assert page.script(WINDOW) == [low, high]
    assert page.errors() == []


def test_a_plain_wheel_scrolls_the_page(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    untouched = page.script(
        "const turn = {deltaY: 100, cancelable: true, bubbles: true};"
        "return bapipe.view.box.dispatchEvent(new WheelEvent('wheel', turn));"
    )
    assert untouched


def test_the_keys_walk_over_actions_and_tell_them(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    press(page, "ArrowDown")
    said = "return document.getElementById('readout').innerText;"
    assert page.script(said).startswith("0F0: forward of micro-batch 0, stage 0")
    press(page, ".")
    assert page.script(said).startswith("0F1: ")
    press(page, ",")
    press(page, "ArrowDown")
    assert page.script(said).startswith("1F0: ")
    assert page.script(VIEW + "return v.selected;") == 0


def test_everything_can_be_reached_by_tab(open_page: Open, with_run: Path) -> None:
    page = open_page(with_run)
    reached = set()
    for _ in range(60):
        page.chrome.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", "key": "Tab", "code": "Tab"})
        reached.add(page.script("return document.activeElement.id || document.activeElement.className;"))
    assert {"theme", "zoom-in", "zoom-out", "zoom-all", "timeline-shown", "highlight", "timeline-view"} <= reached


def test_predicted_and_measured_share_an_axis(open_page: Open, with_run: Path) -> None:
    page = open_page(with_run)
    rows = VIEW + "return v.rows.map(item => item.row.rank + ' ' + item.t.name);"
    both = page.script(rows)
    assert both[:4] == ["0 predicted", "0 measured", "1 predicted", "1 measured"]
    predicted, measured = page.script(VIEW + "return v.timelines.map(t => v.x(t.end) - v.left);")
    assert measured == pytest.approx(1.25 * predicted)
    for name in ("measured", "predicted"):
        page.script(
            "const s = bapipe.view.choice; s.value = arguments[0]; s.dispatchEvent(new Event('change'));",
            name,
        )
        page.settle()
        assert {row.split()[1] for row in page.script(rows)} == {name}
    assert "−20%" in page.script("return document.getElementById('comparison').innerText;").replace("-", "−")
    assert page.errors() == []

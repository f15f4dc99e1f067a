"""The report in a real browser: no error, no request, on any screen, in any colours, at any size, for anyone."""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapipe.reporting.html.document import make_subject, render_report
from picture_sources import picture_plan
from report_plans import hostile, planned, run_of

Open = Callable[[Path], Any]
VIEW = "const v = bapipe.view; "


@pytest.mark.parametrize("name", ["straight", "with_run", "big"])
def test_it_renders_without_an_error_or_a_request(name: str, open_page: Open, request: Any) -> None:
    page = open_page(request.getfixturevalue(name))
    assert page.errors() == []
    assert page.requests() == []
    assert page.script(VIEW + "return v.stats.rects + v.stats.cells;") > 0
    shown = page.script(
        "return [...document.querySelectorAll('main svg')].map(s => s.getBoundingClientRect().height);"
    )
    assert len(shown) == 4
    assert min(shown) > 100


def test_dark_and_light(open_page: Open, straight: Path) -> None:
    page = open_page(straight)
    colours = (
        "const v = bapipe.view; return [getComputedStyle(document.body).backgroundColor,"
        "getComputedStyle(document.querySelector('.bapipe-chart text')).fill,"
        "v.context.getImageData(2, 2, 1, 1).data[0]];"
    )
    page.emulate(prefers_color_scheme="light")
    light = page.script(colours)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[2] == 255
    page.emulate(prefers_color_scheme="dark")
    dark = page.script(colours)
    assert dark[0] == "rgb(20, 24, 29)"
    assert dark[2] == 20
    assert dark[1] != light[1]
    page.script("document.getElementById('theme').click();")
    page.settle()
    assert page.script(colours) == light


def test_it_prints_light_and_whole(open_page: Open, with_run: Path) -> None:
    page = open_page(with_run)
    page.emulate(prefers_color_scheme="dark")
    page.script(
        "addEventListener('beforeprint', () => {"
        "  window.printed = bapipe.view.context.getImageData(2, 2, 1, 1).data[0]; });"
    )
    found = page.chrome.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(found["data"]).startswith(b"%PDF")
    page.settle()
    assert page.script("return window.printed;") == 255
    assert page.script("return bapipe.view.context.getImageData(2, 2, 1, 1).data[0];") == 20


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_it_without_scrolling_sideways(width: int, open_page: Open, with_run: Path) -> None:
    page = open_page(with_run)
    page.resize(width, 800)
    page.settle()
    assert page.script("return document.documentElement.scrollWidth;") <= width
    assert page.script(VIEW + "return [v.width, v.narrow];") == [
        page.script("return bapipe.view.box.clientWidth;"),
        True,
    ]
    sizes = page.script(
        "return [...document.querySelectorAll('p, td, th, dd, dt, li')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize));"
    )
    assert min(sizes) >= 12


@pytest.mark.parametrize("width", [390, 1280])
def test_pictures_are_readable_to_their_end(width: int, open_page: Open, with_run: Path) -> None:
    """Letters keep their size; what does not fit is reached by scrolling in the picture, which says so."""
    page = open_page(with_run)
    page.resize(width, 900)
    pictures = page.script(
        "return [...document.querySelectorAll('.picture')].map(box => {"
        "  const svg = box.querySelector('svg'); box.scrollLeft = 1e6;"
        "  const seen = box.getBoundingClientRect(), drawn = svg.getBoundingClientRect();"
        "  return {letter: 11 * drawn.width / svg.viewBox.baseVal.width,"
        "    wide: box.scrollWidth > box.clientWidth + 1,"
        "    end: drawn.right <= seen.right + 1, hint: getComputedStyle(box, '::before').content !== 'none'};"
        "});"
    )
    assert len(pictures) >= 4
    for picture in pictures:
        assert picture["letter"] >= 9.5
        assert picture["end"]
        assert picture["wide"] == picture["hint"] == (width < 720)


def test_a_frame_of_64_by_512_is_bounded(open_page: Open, big: Path) -> None:
    page = open_page(big)
    shares = [1.0, 0.6, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001]
    frames = page.script(
        VIEW + "const whole = v.high - v.low;"
        "return arguments[0].flatMap(share => [0, .3, .7].map(place => {"
        "  v.from = v.low + whole * (1 - share) * place; v.to = v.from + whole * share; v.select(7); v.draw();"
        "  return {share, merged: v.merged, width: v.right - v.left, ...v.stats}; }));",
        shares,
    )
    assert sum(page.script(VIEW + "return v.timelines.map(t => t.kind.length);")) > 65_000
    assert {frame["merged"] for frame in frames} == {True, False}
    for frame in frames:
        assert frame["rows"] == 64
        # An action and the wait before it per 3 pixels, or a cell per 2, and the one micro-batch on top.
        assert frame["rects"] <= 2 * 64 * frame["width"] / 3 + 3 * 64
        assert frame["cells"] <= 64 * (frame["width"] / 2 + 1)
        assert frame["lines"] <= 2 * 1500 + 4 * 64
        assert frame["rects"] + frame["cells"] > 0
    assert page.errors() == []


def test_merged_cells_show_the_true_shares(open_page: Open, big: Path) -> None:
    """Over the whole view the pixels of a row hold as much of each kind as its actions take."""
    page = open_page(big)
    rows = page.script(
        VIEW + "v.select(null); v.show(v.low, v.high); v.draw();"
        "return [52, 60, 63].map(n => { const item = v.rows[n], t = item.t, r = v.canvas.width / v.width;"
        "  const image = v.context.getImageData(v.left * r, item.y * r, (v.right - v.left) * r, item.h * r).data;"
        "  const count = [0, 0]; let all = 0;"
        "  for (let i = 0; i < image.length; i += 4) { all++;"
        "    v.kinds.slice(0, 2).forEach((k, n) => { const c = parseInt(k.color.slice(1), 16);"
        "      const [r, g, b] = [c >> 16, c >> 8 & 255, c & 255];"
        "      if (image[i] === r && image[i + 1] === g && image[i + 2] === b) count[n]++; }); }"
        "  const spent = [0, 0]; for (let i = item.row.first; i < item.row.last; i++)"
        "    if (t.kind[i] < 2) spent[t.kind[i]] += t.finish[i] - t.start[i];"
        "  return count.map((c, n) => [c / all, spent[n] / (v.high - v.low)]); });"
    )
    for row in rows:
        for shown, true in row:
            assert shown == pytest.approx(true, abs=0.09)  # a row is 7 pixels high


def test_hostile_names_do_nothing(open_page: Open, folder: Path) -> None:
    plan = hostile(planned("hybrid")[0])
    (folder / "hostile.html").write_text(render_report(make_subject(plan, record=run_of(plan))), encoding="utf-8")
    page = open_page(folder / "hostile.html")
    assert page.errors() == []
    assert page.requests() == []
    assert page.script("return document.querySelectorAll('img, main script').length;") == 0
    assert page.script("return document.querySelector('h1').innerText;").startswith("</script><script>alert(1)")
    assert page.script("return document.documentElement.scrollWidth <= innerWidth;")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["straight", "with_run"])
def test_axe_finds_nothing_serious(name: str, scheme: str, open_page: Open, request: Any) -> None:
    found = importlib.util.find_spec("axe_core_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-core is not installed; `pip install axe-core-python` brings it")
    source = next(Path(next(iter(found.submodule_search_locations))).rglob("axe.min.js"), None)
    assert source is not None, "axe-core-python has no axe.min.js; reinstall it"
    page = open_page(request.getfixturevalue(name))
    page.emulate(prefers_color_scheme=scheme)
    page.script("document.querySelectorAll('details').forEach(each => { each.open = true; });")
    page.script(source.read_text(encoding="utf-8") + "; window.axe = axe;")
    result = page.chrome.execute_async_script(
        "const done = arguments[0]; axe.run(document).then(found => done([found.violations, found.passes]));"
    )
    violations, passes = result
    assert {"color-contrast", "label", "heading-order"} <= {check["id"] for check in passes}
    serious = [
        (violation["id"], violation["help"], [node["html"][:200] for node in violation["nodes"][:3]])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_the_readme_s_screenshot(open_page: Open, folder: Path, tmp_path: Path) -> None:
    """Taken here so that it shows what the report is today; BAPIPE_SCREENSHOTS names the folder to keep it in."""
    plan, profile = picture_plan()
    (folder / "shot.html").write_text(render_report(make_subject(plan, profile=profile)), encoding="utf-8")
    page = open_page(folder / "shot.html")
    page.emulate(prefers_color_scheme="light")
    page.resize(1120, 1000)
    page.script("document.documentElement.style.scrollbarWidth = 'none';")
    page.settle()
    shot = base64.b64decode(page.chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    kept = os.environ.get("BAPIPE_SCREENSHOTS")
    file = Path(kept) / "report.png" if kept else tmp_path / "report.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(shot)
    assert shot.startswith(b"\x89PNG")
    assert len(shot) > 30_000

"""Two plans side by side in a browser: the time cursor moves by hand and by itself, and stays put if asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bapipe
from bapipe.reporting.html.side_by_side import render_side_by_side

STATE = "return [player.time, player.playing, player.line.style.left, document.getElementById('now').textContent];"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plans = [
        bapipe.plan("alexnet", "2xv100", global_batch=64, micro_batch=8, stages=2, schedule=schedule)
        for schedule in ("gpipe", "1f1b-sno")
    ]
    path = tmp_path_factory.mktemp("both") / "both.html"
    path.write_text(render_side_by_side(plans), encoding="utf-8")
    return path


def test_the_cursor_follows_the_slider_and_plays(both: Path, open_page: Callable[[Path], Any]) -> None:
    page = open_page(both)
    begin, playing, left, words = page.script(STATE)
    assert (begin, playing) == (0, False)
    assert "A at 0: 0 of 8 micro-batches done" in words
    page.script(
        "const range = document.getElementById('scrub'); range.value = 1000;"
        "range.dispatchEvent(new Event('input'));"
    )
    end, _, moved, words = page.script(STATE)
    assert end > 0
    assert moved != left
    assert words.count("8 of 8 micro-batches done, done") == 2
    page.script("document.getElementById('play').click();")
    assert page.script("return player.playing;")
    page.script("document.getElementById('play').click();")
    assert not page.script("return player.playing;")
    # Zooming takes the cursor along.
    page.script("player.go(player.at(0.5)); bapipe.view.show(player.at(0.4), player.at(0.6)); bapipe.view.draw();")
    x, middle = page.script(
        "const v = bapipe.view; return [parseFloat(player.line.style.left), (v.left + v.right) / 2];"
    )
    assert x == pytest.approx(middle, abs=1)


def test_who_wants_no_motion_gets_none(both: Path, open_page: Callable[[Path], Any]) -> None:
    page = open_page(both)
    page.emulate(prefers_reduced_motion="reduce")
    page.script("player.play();")
    assert not page.script("return player.playing;")
    assert page.script("return getComputedStyle(document.getElementById('play')).display;") == "none"


def test_a_phone_needs_no_sideways_scrolling(both: Path, open_page: Callable[[Path], Any]) -> None:
    page = open_page(both)
    page.resize(390, 800)
    wide, table, room = page.script(
        "const t = document.getElementById('figures-table');"
        "return [document.documentElement.scrollWidth, t.offsetWidth, t.parentElement.clientWidth];"
    )
    assert wide <= 390
    assert table <= room
    assert page.errors() == []
    assert page.requests() == []

"""Figures of benchmarks in README, docs and benchmarks are those of the result files, and say what they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs" / "_ext"))

import figures

PAGES = figures.pages()


def _name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_has_the_figures_of_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == figures.filled(text, page), "run scripts/figures"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_table_of_figures_is_made_from_a_result_file(page: Path) -> None:
    if figures.written_by_programs(page):
        return
    by_hand = [
        f"line {line}: {head[:80]}"
        for line, head, made in figures.figure_tables(page.read_text(encoding="utf-8"))
        if not made
    ]
    assert not by_hand, f"{_name(page)}: make it from a result file (docs/_ext/figures.py says how): {by_hand}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_result_file_that_a_page_names_has_a_program_beside_it(page: Path) -> None:
    for named in re.findall(r"^<!-- figures: \w+ (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        path = REPOSITORY / named.partition(":")[0]
        assert path.exists()
        if path.parent.parent.name == "benchmarks":
            assert (path.parent / "README.md").exists(), f"{named}: no page says by which command it is made"
            assert list(path.parent.glob("*.py")), f"{named}: no program beside it"


def test_a_table_by_hand_is_refused() -> None:
    table = "| system | samples/s |\n|---|---|\n| ours | 786 |\n| theirs | 1.4x |\n"
    assert [made for _, _, made in figures.figure_tables(f"text\n\n{table}\nmore")] == [False]
    made = f"<!-- figures: measured a.json rows\nx | y\n-->\n\n{table}\n<!-- end of figures -->\n"
    assert [made for _, _, made in figures.figure_tables(made)] == [True]
    assert [made for _, _, made in figures.figure_tables(f"<!-- given: a data sheet -->\n\n{table}\n{table}")] == [
        True,
        False,
    ]
    assert not list(figures.figure_tables("| option | meaning |\n|---|---|\n| `--out` | where to write |\n"))


def test_a_block_is_a_table_with_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "result.json").write_text(
        '{"rows": [{"name": "a", "s": 0.0012, "off": -0.034, "in": {"two words": 3}}, {"name": "b", "s": 2}]}'
    )
    text = (
        "before <!-- figure: result.json rows.0.off +.1% -->?<!-- end -->\n"
        "<!-- figures: measured result.json rows\nname | {name}\ntime | {s:ms.1f} ms\noff | {off:+.1%}\n"
        "deep | {in/two words}\n-->\nold\n<!-- end of figures -->\nafter\n"
    )
    filled = figures.filled(text, tmp_path / "page.md")
    assert "| a | 1.2 ms | -3.4 % | 3 |" in filled
    assert "| b | 2000.0 ms | – | – |" in filled
    assert "*Measured: `result.json`.*" in filled
    assert "before <!-- figure: result.json rows.0.off +.1% -->-3.4 %<!-- end -->" in filled
    assert "old" not in filled
    assert figures.filled(filled, tmp_path / "page.md") == filled


@pytest.mark.parametrize(
    ("head", "error"), [("guessed result.json rows", ValueError), ("measured result.json nothing.here", KeyError)]
)
def test_a_block_without_a_label_or_a_result_is_refused(
    head: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures._result.cache_clear()
    (tmp_path / "result.json").write_text('{"rows": []}')
    text = f"<!-- figures: {head}\nname | {{name}}\n-->\n<!-- end of figures -->\n"
    with pytest.raises(error):
        figures.filled(text, tmp_path / "page.md")

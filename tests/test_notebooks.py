"""Notebooks run from the first cell to the last; no notebook server is needed, as their files are JSON."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "examples").glob("*.ipynb"))


def run_cells(cells: list[dict[str, Any]]) -> list[object]:
    """Run code cells one after the other, and return the value of each cell's last line where it is one."""
    names: dict[str, object] = {"__name__": "__main__"}
    shown: list[object] = []
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names))
    return shown


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs_and_shows_plans_and_timelines(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    shown = [value for value in run_cells(book["cells"]) if value is not None]
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) >= 2
    assert all("<svg" in page for page in pages)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_output_is_kept_in_the_file(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_a_cell_that_fails_is_noticed() -> None:
    with pytest.raises(AssertionError):
        run_cells([{"cell_type": "code", "source": ["assert 1 == 2\n"]}])

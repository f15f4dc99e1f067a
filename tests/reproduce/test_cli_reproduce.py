"""`bapipe reproduce`, its page and what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import bapipe.reproduce
from bapipe.cli import cli
from bapipe.errors import BaPipeError, FileFormatError
from bapipe.reproduce import TABLES, Table
from bapipe.reproduce.measured import DEFAULT_RESULTS, measured_cells, read_measured
from bapipe.reproduce.render_tables import markdown_page
from paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "reproduction.md"


@pytest.fixture
def quick(tables: dict[str, Table], monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    """The command with tables that are computed already."""
    monkeypatch.setattr(bapipe.reproduce, "TABLES", {name: lambda t=table: t for name, table in tables.items()})
    return tables


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "96", "NO_COLOR": "1"}).invoke(
        cli, ["reproduce", *arguments], catch_exceptions=False
    )


@pytest.mark.usefixtures("quick")
def test_json_has_exactly_what_is_promised() -> None:
    found = json.loads(run("all", "--json").output)
    assert [item["table"] for item in found] == list(TABLES)
    for item in found:
        assert set(item) == {"table", "cells", "notes"}
        assert item["cells"]
        assert all(isinstance(note, str) for note in item["notes"])
        for cell in item["cells"]:
            assert set(cell) == {"row", "column", "paper", "ours", "error", "calibrated"}
            assert isinstance(cell["calibrated"], bool)
            if isinstance(cell["paper"], (int, float)) and cell["paper"]:
                assert cell["error"] == pytest.approx(cell["ours"] / cell["paper"] - 1, abs=1e-8)


def test_one_table_is_one_object() -> None:
    found = json.loads(run("table5", "--json").output)
    assert found["table"] == "table5"


def test_every_constant_and_its_source_is_in_the_notes(quick: dict[str, Table]) -> None:
    for name in ("table3", "table4", "table6"):
        notes = "\n".join(quick[name].notes)
        assert quick[name].constants
        for constant in quick[name].constants:
            assert constant.name in notes
            assert constant.source in notes


@pytest.mark.usefixtures("quick")
def test_the_terminal_shows_paper_ours_and_error() -> None:
    text = run("table3").output
    assert all(len(line) <= 96 for line in text.splitlines())
    assert re.search(r"BaPipe +3\.9 +3\.913 +\+0\.3% +±15%", text)
    assert "β(4) = 1.587 GB/s per GPU (calibrated" in text
    assert re.search(r"DP, B=32 +0\.62 +0\.62 +0 +±0\.005 +fitted", text)


def test_a_page_can_be_written(quick: dict[str, Table], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run("all", "--markdown", str(page)).exit_code == 0
    assert page.read_text(encoding="utf-8") == markdown_page(quick.values())


def test_the_committed_page_is_what_is_computed_now(tables: dict[str, Table]) -> None:
    """Every number on it; make it again with `bapipe reproduce all --markdown docs/reproduction.md`."""
    assert PAGE.read_text(encoding="utf-8") == markdown_page(tables.values())


def test_check_names_what_is_off(quick: dict[str, Table], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("all", "--check").exit_code == 0
    table = quick["table5"]
    first = dataclasses.replace(table.cells[0], ours=6841.0)
    broken = dataclasses.replace(table, cells=(first, *table.cells[1:]))
    monkeypatch.setattr(bapipe.reproduce, "TABLES", {"table5": lambda: broken})
    assert run("table5").exit_code == 0
    result = run("table5", "--check")
    assert result.exit_code == 1
    assert "outside its limit: table5: DSP Slices, VCU118: ours 6841.0, paper 6840.0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel3"], "did you mean 'table3'"),
        (["table1", "--results", "x.json"], "add --measured"),
        (["table1", "--markdown", "x.md", "--json"], "leave --json and --measured out"),
        (["table3", "--measured", "--results", "nowhere.json"], "nowhere.json"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        cli.main(["reproduce", *arguments], standalone_mode=False)


def written(folder: Path, value: Any) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


@pytest.mark.usefixtures("quick")
def test_measured_figures_stand_beside_the_paper_s(tmp_path: Path) -> None:
    rows = [
        {"model": "gnmt-8", "case": "dp-64", "throughput": 200.0},
        {"model": "gnmt-8", "case": "dp", "throughput": 500.0},
        {"model": "gnmt-8", "case": "auto", "throughput": 700.0},
        {"model": "gnmt-8", "case": "pipedream", "error": "no answer in time"},
    ]
    uneven = {"slices": 4, "percentages": [50, 25, 12.5, 12.5], "rows": [{**rows[2], "throughput": 1.0}]}
    emulated = {"slices": 4, "emulated": {"bandwidth": 1e9}, "rows": [rows[0], {**rows[2], "throughput": 780.0}]}
    largest = [{"system": "BaPipe", "slices": 2, "layers": 80}]
    later = {"slices": 4, "rows": [{"model": "gnmt-8", "case": "auto", "throughput": 900.0}]}
    plain = {"model": "resnet50", "case": "auto", "schedule": "data-parallel", "throughput": 5.0}
    other = {"slices": 4, "rows": [plain, {"model": "resnet50", "case": "so", "throughput": 4.0}]}
    runs = [{"slices": 4, "rows": rows}, uneven, emulated, later, other]
    path = written(tmp_path, {"environment": "a GPU", "runs": runs, "largest": largest})
    found = json.loads(run("table3", "--measured", "--results", str(path), "--json").output)
    cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    assert cells["GNMT-8, 4 slices", "BaPipe, measured"]["ours"] == 3.5
    assert cells["GNMT-8, 4 slices", "BaPipe, measured"]["paper"] == 3.9
    assert cells["GNMT-8, 4 slices", "BaPipe over DP accumulated, measured"]["ours"] == 1.4
    assert cells["GNMT-8, 4 slices", "PipeDream, measured"]["ours"] is None
    assert cells["ResNet-50, 4 slices", "1F1B-SO, forced, over DP accumulated, measured"]["ours"] == 0.8
    assert cells["GNMT-8, 4 slices", "BaPipe, measured, emulated links"]["error"] == pytest.approx(0)
    assert cells["VGG-16, 8 slices", "DP, B=32, measured"]["error"] is None
    text = run("table4", "--measured", "--results", str(path)).output
    assert re.search(r"L, 2 slices, measured +74 +80 +\+8\.1%", text)
    assert "not measured" in text
    assert "measured: a GPU" in text


def test_the_committed_results_can_be_read() -> None:
    found = read_measured()
    assert DEFAULT_RESULTS.exists()
    assert found.throughput
    assert len(measured_cells("table3", found)) >= 6 * 4
    assert measured_cells("table1", found) == ()


def test_results_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileFormatError, match="no list of runs"):
        read_measured(written(tmp_path, [1]))
    monkeypatch.setattr("bapipe.reproduce.measured.DEFAULT_RESULTS", tmp_path / "none.json")
    with pytest.raises(BaPipeError, match="give --results FILE"):
        read_measured()

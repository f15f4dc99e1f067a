"""The benchmark on slices of a GPU goes the whole way on the CPU. Its times there mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapipe.costs.profile import write_profile
from bapipe.models.layers import ModelRef
from loaded_files import load_file
from made_profiles import made_profile

FOLDER = Path(__file__).parents[2] / "benchmarks" / "slices"


def _run(program: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / program), "--rehearse", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def _check_measured(row: dict[str, Any], ranks: int) -> None:
    assert "error" not in row, row
    assert row["predicted"] > 0
    assert row["measured"] > 0
    assert row["throughput"] == pytest.approx(row["global_batch"] / row["measured"])
    assert len(row["memory_measured"]) == ranks


def test_a_rehearsal_measures_what_can_be_and_records_what_fails(tmp_path: Path) -> None:
    """A model whose code is not there fails on the workers, and does not fit one rank; the next is trained."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    made = made_profile({"cpu-50pct": [1.0, 1.0]}, weights=[5e9, 5e9])
    missing = replace(made, model=ModelRef(name="resnet50", ref="nowhere:build", args={}))
    write_profile(missing, profiles / "resnet50-fp32.json")
    out = tmp_path / "out"
    done = _run(
        "slices.py", "--out", str(out), "--profiles", str(profiles), "--count", "2", "--models", "resnet50,vgg16",
        "--cases", "resnet50:so,dp,vgg16:torch-1f1b,vgg16:so", "--budget-seconds", "850", timeout=900,
    )  # fmt: skip
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["rehearsal"]
    assert result["left_out"] == []
    assert set(result["links"]) == {"latency", "bandwidth", "all_reduce", "all_reduce_loaded"}
    rows = {(row["model"], row["case"]): row for row in result["rows"]}
    assert len(rows) == 5
    assert "'nowhere:build' cannot be imported" in rows["resnet50", "so"]["error"]
    assert rows["resnet50", "so"]["predicted"] > 0
    assert "Traceback" in done.stderr, "what the workers said is shown"
    assert "fit" in rows["resnet50", "dp"]["error"]
    for case in ("so", "dp", "torch-1f1b"):
        _check_measured(rows["vgg16", case], 2)
    assert rows["vgg16", "torch-1f1b"]["schedule"] == "torch Schedule1F1B"
    assert len(rows["vgg16", "so"]["stages"]) == 2
    with tarfile.open(out / "records.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"vgg16-so.plan.json", "vgg16-so.run.json", "vgg16-dp.run.json"} <= names
    table = (out / "result.md").read_text(encoding="utf-8")
    assert "| vgg16 | dp (data-parallel) |" in table
    assert "cannot be imported" in table
    assert not (out / "workers").exists()


@pytest.mark.parametrize(
    "first, largest, expected",
    [
        (100, 104, [100, 104, 108]),
        (100, 94, [100, 96, 88, 92]),
        (10, 10, [10, 12]),
        (10, 6, [10, 8]),
        (204, 300, [204, 210, 216, 222]),
    ],
)
def test_the_largest_size_is_searched_up_down_and_between(first: int, largest: int, expected: list[int]) -> None:
    following = load_file(FOLDER / "size_search.py", "slices_size_search").following
    outcomes: dict[int, str] = {}
    for _ in range(4):
        size = following(first, outcomes)
        if size is None:
            break
        outcomes[size] = "trained" if size <= largest else "out of memory"
    assert list(outcomes) == expected
    assert following(first, {first: "error"}) is None


@pytest.mark.slow
def test_every_case_is_rehearsed(tmp_path: Path) -> None:
    _run("slices.py", "--out", str(tmp_path), "--budget-seconds", "500", timeout=600)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["left_out"] == []
    for row in result["rows"]:
        _check_measured(row, 2)
    assert sum(row["split"] for row in result["rows"]) > 0, "nothing is divided, so that is not rehearsed"


@pytest.mark.slow
def test_unequal_shares_over_emulated_links_are_rehearsed(tmp_path: Path) -> None:
    _run(
        "slices.py", "--out", str(tmp_path), "--models", "vgg16", "--cases", "so,as-if-equal,uniform,dp",
        "--percentages", "60,40", "--emulate", "1e8", timeout=300,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["emulated"]
    for row in result["rows"]:
        _check_measured(row, 2)


@pytest.mark.slow
def test_the_search_for_the_largest_is_rehearsed(tmp_path: Path) -> None:
    _run("largest.py", "--out", str(tmp_path), "--systems", "DP,BaPipe", timeout=300)
    rows = json.loads((tmp_path / "largest.json").read_text(encoding="utf-8"))
    assert [row["system"] for row in rows] == ["DP", "BaPipe"]
    for row in rows:
        assert row["predicted"] >= 8
        assert row["tried"][0]["layers"] == row["predicted"]
        assert {item["outcome"] for item in row["tried"]} <= {"trained", "out of memory"}

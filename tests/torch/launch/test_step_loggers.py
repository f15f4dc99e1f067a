"""Loggers of a run's steps: CSV, a function of one's own, and those that need a package."""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.records.plan import read_plan
from bapipe.records.run_record import StepRecord
from bapipe.torch.launch.display import Display
from bapipe.torch.launch.step_loggers import check_logger, make_logger
from paths import REPOSITORY

NAMES = ["step", "loss", "seconds", "samples_per_second", "bubble", "measured_over_predicted"]


def shown(*words: str, first: int = 0) -> None:
    plan = read_plan(REPOSITORY / "examples" / "plan.json")
    display = Display(plan, 2, loggers=[make_logger(word) for word in words], stream=io.StringIO())
    display.step(StepRecord(step=first, loss=2.5, seconds=0.5), 0.25)
    display.step(StepRecord(step=first + 1, loss=float("nan"), seconds=1.0), None)
    display.close()


def test_csv_has_a_line_per_step_and_is_continued(tmp_path: Path) -> None:
    shown(f"csv:{tmp_path}/steps.csv")
    shown(f"csv:{tmp_path}/steps.csv", first=2)  # as after --resume
    header, *rows = csv.reader(io.StringIO((tmp_path / "steps.csv").read_text(encoding="utf-8")))
    assert header == NAMES
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][1:3] == ["2.5", "0.5"]
    assert rows[1][1] == rows[1][4] == ""  # not finite, not traced


def test_a_function_of_ones_own_is_called_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_logger.py").write_text("taken = []\nlog = taken.append\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shown("own_logger:log")
    assert [list(figures) for figures in sys.modules["own_logger"].taken] == [NAMES, NAMES]
    with pytest.raises(BaPipeError, match=r"^--log own_logger:lag cannot be imported: .*; put it on PYTHONPATH"):
        make_logger("own_logger:lag")
    with pytest.raises(BaPipeError, match=r"^--log own_logger:taken is no function; give one"):
        make_logger("own_logger:taken")


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(
        BaPipeError, match=f"^--log {package} needs {package}, which is not installed; pip install"
    ):
        check_logger(f"{package}:x")


@pytest.mark.parametrize("word", ["csv", "steps.csv", "csv:", ""])
def test_an_unknown_word_is_one_line(word: str) -> None:
    with pytest.raises(BaPipeError, match=r"^--log takes csv:FILE, tensorboard:FOLDER, wandb:PROJECT or package"):
        check_logger(word)


def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is optional")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    shown("wandb:mine")
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))

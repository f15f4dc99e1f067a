"""A sample of `benchmarks/reliability`: mutated files and random command lines end with 0, 1 or 2 and one line.

Warnings are errors here, so an overflow that nobody refused is found too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paths import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "reliability"
SEED = 2024


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The programs of the benchmark, as modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("BAPIPE_TRACEBACK", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("BAPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield {name: importlib.import_module(name) for name in ("fuzz_files", "fuzz_commands", "fuzz_worker")}
    for name in set(sys.modules) - before:
        if name.startswith("fuzz_"):
            del sys.modules[name]


def test_mutated_files_end_in_a_line(fuzz: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    kinds, codes = set(), set()
    for number in range(220):
        kind, case = fuzz["fuzz_files"].file_case(SEED, number)
        found = fuzz["fuzz_worker"].run_case(case, folder)
        assert found["wrong"] is None, (number, found)
        kinds.add(kind)
        codes.update(found["codes"])
    assert kinds == set(fuzz["fuzz_files"].WEIGHTS)
    assert codes == {0, 2}


def test_random_command_lines_end_in_a_line(fuzz: dict[str, Any], tmp_path: Path) -> None:
    """Without those that load torch, and plans of large models: they take most of the time."""
    folder = tmp_path / "case"
    folder.mkdir()
    ran = set()
    for number in range(200):
        line = fuzz["fuzz_commands"].command_line(SEED, number)
        if line[0] not in ("simulate", "report", "compare", "merge", "launch", "run", "slices"):
            continue
        found = fuzz["fuzz_worker"].run_case(fuzz["fuzz_commands"].command_case(SEED, number)[1], folder)
        assert found["wrong"] is None, (number, line, found)
        ran.add(line[0])
    assert len(ran) == 7


def test_the_contract_tells_a_traceback_and_a_strange_exit(fuzz: dict[str, Any]) -> None:
    complaint = fuzz["fuzz_worker"].complaint
    line = {"code": 2, "stderr": "bapipe: no\n"}
    assert complaint(line) is None
    assert complaint({**line, "code": 3}) == "exit code 3"
    assert complaint({**line, "stderr": "Traceback (most recent call last)\nbapipe: no"}) == "a traceback"
    assert complaint({**line, "stderr": "bapipe: not enough memory for so many actions"}) == "more than 2 GB"
    assert complaint({**line, "stderr": "no"}) == "refused without a line"

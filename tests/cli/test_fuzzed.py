"""A sample of `benchmarks/reliability`: mutated files and random command lines end with 0, 1 or 2 and one line.

Warnings are errors here, so an overflow that nobody refused is found too.
"""

from __future__ import annotations

import importlib
import json
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
    names = ("fuzz_files", "fuzz_commands", "fuzz_worker", "fuzz_result", "fuzz_lines")
    yield {name: importlib.import_module(name) for name in names}
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
    assert codes == {0, 1, 2}  # 1: a manifest is damaged


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


def test_every_command_and_option_of_click_is_tried(fuzz: dict[str, Any]) -> None:
    """Those that are added, too: nothing here lists them."""
    commands = fuzz["fuzz_commands"]
    table = commands.command_table()
    wanted = {
        (words, name)
        for words, command in table.items()
        for option in command.params
        if option.param_type_name == "option" and option.name not in commands.NEVER
        for name in (*option.opts, *option.secondary_opts)
    }
    seen: set[tuple[tuple[str, ...], str]] = set()
    tried: set[tuple[str, ...]] = set()
    for number in range(25_000):
        line = commands.command_line(SEED, number)
        words = tuple(line[:2]) if tuple(line[:2]) in table else tuple(line[:1])
        tried.add(words)
        seen.update((words, word) for word in line if word.startswith("-"))
        if number > 4000 and not wanted - seen:
            break
    assert not wanted - seen
    assert tried >= set(table)


def test_the_examples_of_a_commands_help_are_where_lines_begin(fuzz: dict[str, Any]) -> None:
    shown = fuzz["fuzz_commands"].examples()
    example = "judge 3,3,3,3 --profile profile.json --cluster cluster.toml --trace both.json"
    assert example.split() in shown["judge",]
    assert not shown["profile",]


def test_no_process_is_started(fuzz: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bapipe run` of a valid plan gets as far as its ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text((REPOSITORY / "examples" / "plan.json").read_text())
    found = fuzz["fuzz_worker"].run_line(["slices", "status"])
    assert found["code"] in (0, 2), found
    found = fuzz["fuzz_worker"].run_line(["run", "plan.json", "--steps", "1"])
    assert (found["code"], found["stderr"][:27]) == (2, "bapipe: no process is start"), found


def test_every_format_has_a_document_and_commands(fuzz: dict[str, Any]) -> None:
    files = fuzz["fuzz_files"]
    assert set(files.WEIGHTS) == set(files.documents()) == set(fuzz["fuzz_lines"].COMMANDS)


def test_a_campaign_goes_on_with_what_is_missing(fuzz: dict[str, Any], tmp_path: Path) -> None:
    result, path = fuzz["fuzz_result"], tmp_path / "result.json"
    right: dict[str, Any] = {"codes": [0, 2], "seconds": 0.5, "peak": 7, "wrong": None}
    for numbers in ((0, 1, 2), (6, 7), (3,)):
        counts = result.Counts()
        for number in numbers:
            counts.add(number, "plan", right)
        if 6 in numbers:
            counts.failures.append(result.Failure(case=6, site="a traceback", kind="plan", line=("report",)))
        result.record(path, "files", 1, counts)
    done = result.done_ranges(path, "files", 1)
    assert done == [(0, 4), (6, 8)]
    assert result.done_ranges(path, "files", 2) == []
    assert list(result.missing_ranges(done, 0, 12, 3)) == [(4, 6), (8, 11), (11, 12)]
    assert result.failing_numbers(path, "files", 1) == [6]
    again = result.Counts()
    again.add(6, "plan", right)
    result.record(path, "files", 1, again, again=True)
    [entry] = json.loads(path.read_text())["files"]
    assert (entry["cases"], entry["commands run"], entry["exit codes"]) == (6, 12, {"0": 6, "2": 6})
    assert (entry["failed cases"], entry["failures"], entry["mended"]) == (1, [], ["a traceback"])


def test_what_a_command_has_written_is_read_again(fuzz: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "traced.json").write_text('{"schema": "bapipe.profile/1"}')
    assert "traced.json" in fuzz["fuzz_worker"]._refused_output(tmp_path)


def test_the_contract_tells_a_traceback_and_a_strange_exit(fuzz: dict[str, Any]) -> None:
    complaint = fuzz["fuzz_worker"].complaint
    line = {"code": 2, "stderr": "bapipe: no\n"}
    assert complaint(line) is None
    assert complaint({**line, "code": 3}) == "exit code 3"
    assert complaint({**line, "stderr": "Traceback (most recent call last)\nbapipe: no"}) == "a traceback"
    assert complaint({**line, "stderr": "bapipe: not enough memory for so many actions"}) == "more than 2 GB"
    assert complaint({**line, "stderr": "no"}) == "refused without a line"

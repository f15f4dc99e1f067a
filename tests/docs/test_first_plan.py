"""The README's first section is what benchmarks/first_plan timed: a model of one's own, in four commands."""

from __future__ import annotations

import json
import runpy

from paths import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "first_plan"
PROGRAM = runpy.run_path(str(FOLDER / "run.py"))
COMMANDS, MODEL = PROGRAM["start_section"]((REPOSITORY / "README.md").read_text(encoding="utf-8"))
RESULT = json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))


def test_the_commands_that_were_timed_are_the_readmes() -> None:
    assert [row["command"] for row in RESULT["commands"]] == COMMANDS
    assert len(COMMANDS) <= PROGRAM["MOST_COMMANDS"]
    assert RESULT["seconds"] <= PROGRAM["MOST_SECONDS"]


def test_the_model_is_plain_pytorch_and_not_the_repositorys() -> None:
    assert "bapipe" not in MODEL
    assert "examples" not in MODEL
    compile(MODEL, "my_model.py", "exec")
    assert RESULT["plan"]["model"] == "my_model:build"

"""What a planning process makes of a question."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from bapipe.cli.plan import plan_command
from bapipe.errors import BaPipeError
from bapipe.io.files import content_hash
from bapipe.records.plan import read_plan
from bapipe.serve.planning import answer_parts, draft_question, plan_question
from bapipe.serve.question import Question

SMALL = Question(model="alexnet", cluster="2xv100", global_batch=16)


def test_a_large_timeline_is_left_out_but_its_plan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(answer_parts(SMALL)["answer"])
    monkeypatch.setattr("bapipe.serve.planning.MOST_ACTIONS", whole["actions"] - 1)
    parts = answer_parts(SMALL)
    assert json.loads(parts["answer"]) == {**whole, "data": None}
    assert set(parts) == {"answer", "plan.json", "cluster.toml", "command.sh", "report.html"}


def test_a_draft_fits_its_question() -> None:
    question = Question(model="gnmt-8", cluster="4xv100", global_batch=64, memory_limit="4GB", stages=3)
    draft = draft_question(question)
    assert draft is not None
    assert (len(draft.plan.stages), draft.plan.global_batch) == (3, 64)
    assert all(stage.memory_bytes <= 4e9 for stage in draft.plan.stages)
    assert draft.plan.prediction.time >= plan_question(question).plan.prediction.time


def test_k_is_planned_told_and_said_again(tmp_path: Path) -> None:
    lean, rich = (
        Question(model="gnmt-8", cluster="4xv100", global_batch=128, microbatch=4, stages=4, cap=cap)
        for cap in (2, 10)
    )
    plans = [plan_question(question).plan for question in (lean, rich)]
    assert [plan.schedule.caps for plan in plans] == [(2, 2, 2, 1), (10, 7, 4, 1)]
    assert [[stage.in_flight for stage in plan.stages] for plan in plans] == [[2, 2, 2, 1], [10, 7, 4, 1]]
    assert draft_question(rich) is None
    parts = answer_parts(rich)
    words = shlex.split(parts["command.sh"])
    assert words[words.index("--in-flight") + 1] == "10"
    words[words.index("plan.json")] = str(tmp_path / "plan.json")
    made = CliRunner().invoke(plan_command, words[2:], catch_exceptions=False)
    assert made.exit_code == 0
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == parts["plan.json"]


def test_the_hash_of_a_plan_for_fpgas_is_that_of_its_file(tmp_path: Path) -> None:
    parts = answer_parts(Question(model="alexnet", cluster="2xvcu118", global_batch=32))
    (tmp_path / "plan.json").write_text(parts["plan.json"], encoding="utf-8")
    assert json.loads(parts["answer"])["hash"] == content_hash(read_plan(tmp_path / "plan.json"))


def test_code_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even past the server's own list of files."""
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    for cluster in ("2xv100", "2xvcu118"):
        with pytest.raises(
            BaPipeError, match=r"is code, whose costs are not known|FPGAs take a built-in CNN or a layer table"
        ):
            plan_question(Question(model="os:system", cluster=cluster))

"""What a planning process makes of a question."""

from __future__ import annotations

import json

import pytest

from bapipe.errors import BaPipeError
from bapipe.serve.planning import answer_parts, draft_question, plan_question
from bapipe.serve.question import Question

SMALL = Question(model="alexnet", cluster="2xv100", minibatch=16)


def test_a_large_timeline_is_left_out_but_its_plan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(answer_parts(SMALL)["answer"])
    monkeypatch.setattr("bapipe.serve.planning.MOST_ACTIONS", whole["actions"] - 1)
    parts = answer_parts(SMALL)
    assert json.loads(parts["answer"]) == {**whole, "data": None}
    assert set(parts) == {"answer", "plan.json", "cluster.toml", "command.sh", "report.html"}


def test_a_draft_fits_its_question() -> None:
    question = Question(model="gnmt-8", cluster="4xv100", minibatch=64, memory_limit="4GB", stages=3)
    draft = draft_question(question)
    assert draft is not None
    assert (len(draft.plan.stages), draft.plan.minibatch) == (3, 64)
    assert all(stage.memory_bytes <= 4e9 for stage in draft.plan.stages)
    assert draft.plan.prediction.time >= plan_question(question).plan.prediction.time


def test_code_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even past the server's own list of files."""
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    for cluster in ("2xv100", "2xvcu118"):
        with pytest.raises(BaPipeError, match=r"is code, whose costs are not known|there is no file os:system"):
            plan_question(Question(model="os:system", cluster=cluster))

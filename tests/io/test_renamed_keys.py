"""Files with the old names of keys load as those with the new ones, and keep their fingerprints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapipe.costs.profile import CostTable, Profile, read_profile
from bapipe.errors import FileFormatError
from bapipe.io.files import content_hash, plain_values
from bapipe.io.renamed_keys import RENAMED_KEYS, first_name
from bapipe.models.layer_table import read_layer_table
from bapipe.records.plan import MemoryParts, Plan, PlanStage, read_plan
from bapipe.records.run_record import RunRecord, read_run
from paths import REPOSITORY

NEW_TO_OLD = {new: old for old, new in RENAMED_KEYS.items()}
EXAMPLES: list[tuple[str, Callable[[Path], Any]]] = [
    ("examples/plan.json", read_plan),
    ("examples/run.json", read_run),
    ("examples/tiny-profile.json", read_profile),
]


def with_old_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {NEW_TO_OLD.get(key, key): with_old_names(item) for key, item in value.items()}
    return [with_old_names(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("name", "read"), EXAMPLES, ids=lambda item: item if isinstance(item, str) else "")
def test_a_file_with_the_old_names_is_the_same(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    values = json.loads((REPOSITORY / name).read_text(encoding="utf-8"))
    old = with_old_names(values)
    assert old != values
    (tmp_path / "old.json").write_text(json.dumps(old), encoding="utf-8")
    found, expected = read(tmp_path / "old.json"), read(REPOSITORY / name)
    assert plain_values(found) == plain_values(expected)
    assert content_hash(found) == content_hash(expected)


def test_a_profile_that_was_measured_before_is_read() -> None:
    path = REPOSITORY / "profiles" / "h200" / "vgg16-fp32.json"
    tables, profile = json.loads(path.read_text(encoding="utf-8"))["accelerators"], read_profile(path)
    for kind, table in tables.items():
        assert plain_values(profile.table(kind).saved_activations) == table["stash"]


def test_the_run_of_the_examples_is_that_of_their_plan() -> None:
    """Its fingerprint was recorded when the plan had the old keys."""
    record, plan = read_run(REPOSITORY / "examples/run.json"), read_plan(REPOSITORY / "examples/plan.json")
    assert record.plan_hash == content_hash(plan)


def test_a_layer_table_may_have_the_old_name(tmp_path: Path) -> None:
    path = REPOSITORY / "examples" / "layers-small-cnn.toml"
    text = path.read_text(encoding="utf-8")
    assert "saved_elements" in text
    (tmp_path / path.name).write_text(text.replace("saved_elements", "stash_elements"), encoding="utf-8")
    assert read_layer_table(tmp_path / path.name) == read_layer_table(path)


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    values = json.loads((REPOSITORY / "examples/plan.json").read_text(encoding="utf-8"))
    values["rivals"] = []
    (tmp_path / "both.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"both\.json: 'rivals' is the old name of 'alternatives'; keep one"):
        read_plan(tmp_path / "both.json")


def test_every_new_name_is_a_field_and_no_old_one_is() -> None:
    written = (Plan, PlanStage, MemoryParts, RunRecord, Profile, CostTable)
    fields = {field.name for kind in written for field in dataclasses.fields(kind)} | {"saved_elements"}
    assert set(RENAMED_KEYS.values()) <= fields
    assert not fields & set(RENAMED_KEYS)
    assert [first_name(new) for new in RENAMED_KEYS.values()] == list(RENAMED_KEYS)

"""What a resume compares, and in which words it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.records.training_record import (
    ModuleOperations,
    OptimizerRecord,
    Structure,
    TrainingRecord,
    dump_training,
    parse_training,
)
from bapipe.torch.checkpoint.checkpoint_options import Saving
from bapipe.torch.checkpoint.training_changes import (
    TrainingChanges,
    checked_settings,
    compare_trainings,
    continued,
)

ADAM = OptimizerRecord(name="torch.optim.adam.Adam", options={"lr": ("0.01",), "weight_decay": ("0", "0.1")})
SGD = OptimizerRecord(name="torch.optim.sgd.SGD", options={"lr": ("0.01",), "momentum": ("0",)})
SAVED = TrainingRecord(
    structure=Structure(sha256="a" * 64, modules=(ModuleOperations(path="0", operations=("aten.relu",)),)),
    precision="fp32",
    optimizer=ADAM,
    settings={"seed": 0, "the data": "synthetic"},
)
GELU = Structure(sha256="b" * 64, modules=(ModuleOperations(path="0", operations=("aten.gelu",)),))
ALL = replace(SAVED, structure=GELU, precision="bf16", optimizer=SGD)


def compare(here: TrainingRecord, saved: TrainingRecord | None = SAVED, **options: Any) -> TrainingChanges:
    sizes = {"the global batch": 8}
    return compare_trainings(saved, here, **{"settings": sizes, "here_settings": sizes, **options})


def test_nothing_is_said_of_the_same_training() -> None:
    found = compare(SAVED)
    found.refuse("saved")
    assert found.lines("saved") == []


def test_what_trains_something_else_is_refused_in_one_line() -> None:
    with pytest.raises(BaPipeError) as caught:
        compare(ALL).refuse("saved/step-00000003")
    assert str(caught.value) == (
        "saved/step-00000003 is of another training: structure: '0' computed aten.relu and computes aten.gelu; "
        "precision: it was fp32 and is bf16; optimizer: it was torch.optim.adam.Adam and is torch.optim.sgd.SGD; "
        "give --accept-changes structure,optimizer,precision to go on all the same (in Python: "
        "load(accept_changes=…)), or another checkpoint"
    )


@pytest.mark.parametrize("accepted", ["structure", "optimizer", "precision"])
def test_what_is_accepted_is_not_refused_and_the_rest_is(accepted: str) -> None:
    with pytest.raises(BaPipeError) as caught:
        compare(ALL, accepted=[accepted]).refuse("saved")
    assert f"{accepted}: " not in str(caught.value)
    assert "--accept-changes structure,optimizer,precision" in str(caught.value)


def test_what_was_accepted_is_said() -> None:
    found = compare(ALL, accepted=("structure", "precision", "optimizer"))
    found.refuse("saved")
    [line] = found.lines("saved")
    assert line.startswith("saved is of another training, as accepted: structure: '0' computed aten.relu and ")
    assert line.endswith(
        "optimizer: it was torch.optim.adam.Adam and is torch.optim.sgd.SGD, whose state begins anew"
    )


def test_settings_are_said_and_go_on() -> None:
    other = replace(ADAM, options={"lr": ("0.5",), "weight_decay": ("0",), "new": ("1",)})
    here = replace(SAVED, optimizer=other, settings={"seed": 3, "the data": "synthetic", "own": 1})
    found = compare(here, here_settings={"the global batch": 16})
    found.refuse("saved")
    assert found.lines("saved") == [
        "saved goes on with other settings: learning rate was 0.01 and stays so, not 0.5 (--accept-changes "
        "learning-rate takes 0.5); weight_decay was 0, 0.1 and stays so, not 0; the global batch was 8 and is 16; "
        "seed was 0 and is 3"
    ]
    assert continued(SAVED, other, found) == replace(other, options={**ADAM.options, "new": ("1",)})


def test_another_learning_rate_is_taken_if_it_is_accepted() -> None:
    other = replace(ADAM, options={**ADAM.options, "lr": ("0.5",)})
    found = compare(replace(SAVED, optimizer=other), accepted=["learning-rate"])
    found.refuse("saved")
    assert found.takes("learning-rate")
    assert found.lines("saved") == ["saved goes on with other settings: learning rate was 0.01 and is 0.5"]
    assert continued(SAVED, other, found) == other


def test_a_checkpoint_without_a_record_is_said_and_not_refused() -> None:
    found = compare(ALL, saved=None, here_settings={"the global batch": 4})
    found.refuse("saved")
    assert found.lines("saved") == [
        "saved was saved before checkpoints recorded structure, optimizer, precision and seed: they are not "
        "compared; the next save has them",
        "saved goes on with other settings: the global batch was 8 and is 4",
    ]


def test_the_record_is_read_as_it_was_written_and_a_newer_one_refused() -> None:
    text = dump_training(SAVED)
    assert parse_training(text, where="training.json") == SAVED
    with pytest.raises(FileFormatError, match=r"has schema 'bapipe\.training/2', expected 'bapipe\.training/1'"):
        parse_training(text.replace("training/1", "training/2"), where="training.json")


def test_words_that_are_unknown_are_refused(tmp_path: Any) -> None:
    with pytest.raises(
        BaPipeError,
        match=r"'structur' cannot be accepted as changed \(did you mean 'structure'\?\); known: structure,",
    ):
        Saving(folder=tmp_path, accept_changes=("structur",))


@pytest.mark.parametrize("value", [[1], float("nan"), {"a": 1}])
def test_settings_that_no_record_can_hold_are_refused(value: Any) -> None:
    with pytest.raises(BaPipeError, match=r"for 'own'; leave it out, or give its text"):
        checked_settings({"seed": 1, "own": value})

"""`bapipe checkpoint list` and `verify`: what there is, and which files are damaged. They need no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from made_checkpoints import made, of_schema, signed

from bapipe.cli import cli
from bapipe.errors import BaPipeError
from bapipe.records.training_record import OptimizerRecord, Structure, TrainingRecord, dump_training
from bapipe.torch.checkpoint.checkpoint_manifest import MANIFEST, TRAINING

RECORD = TrainingRecord(
    structure=Structure(sha256=hashlib.sha256(b"").hexdigest(), modules=()),
    precision="bf16-mixed",
    optimizer=OptimizerRecord(name="torch.optim.adamw.AdamW", options={}),
)


def bapipe(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    for step in (1, 2, 3):
        checkpoint = made(folder, step)
    (checkpoint / TRAINING).write_text(dump_training(RECORD))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][TRAINING] = {}
    signed(checkpoint, manifest)
    return folder


def test_a_list_has_the_latest_first_and_says_what_is_incomplete(saved: Path) -> None:
    (saved / "step-00000002" / "weights").unlink()
    (saved / ".partial-00000004").mkdir()
    done = bapipe("list", saved)
    assert done.exit_code == 0
    header, *rows = done.output.splitlines()
    assert header.split() == ["step", "written", "(UTC)", "size", "state", "model", "optimizer", "precision"]
    assert [row.split()[0] for row in rows[:3]] == ["3", "2", "1"]
    assert rows[0].split()[-4:] == ["complete", "any", "AdamW", "bf16-mixed"]
    assert rows[1].split()[-4:] == ["incomplete", "–", "–", "–"]
    assert rows[2].split()[-4:] == ["complete", "any", "–", "–"]
    assert rows[3:] == [
        f"{saved}/step-00000002 is no complete checkpoint: weights cannot be read: No such file or directory",
        f"{saved}/.partial-00000004 is being written, or was left by a run that was killed; the next save removes "
        "it",
    ]


def test_a_list_as_json_has_an_object_for_each(saved: Path) -> None:
    of_schema(saved / "step-00000002", "bapipe.checkpoint/9")
    found = [json.loads(line) for line in bapipe("list", saved, "--json").output.splitlines()]
    assert [(item["step"], item["state"]) for item in found] == [(3, "complete"), (2, "unknown"), (1, "complete")]
    assert found[0]["optimizer"] == "torch.optim.adamw.AdamW"
    assert found[0]["size"] == sum(path.stat().st_size for path in (saved / "step-00000003").iterdir())
    assert "bapipe.checkpoint/9" in found[1]["problem"]
    [alone] = bapipe("list", saved / "step-00000001", "--json").output.splitlines()
    assert json.loads(alone) == found[2]


def test_whole_checkpoints_are_verified(saved: Path) -> None:
    done = bapipe("verify", saved)
    assert done.exit_code == 0
    assert [line.partition(": ")[0] for line in done.output.splitlines()] == [
        f"{saved}/step-{step:08d}" for step in (3, 2, 1)
    ]
    assert done.output.count("all as they were written") == 3


def test_all_damaged_files_are_named_and_no_others(saved: Path) -> None:
    damaged = saved / "step-00000003"
    (damaged / "weights").write_bytes(b"12346")
    (damaged / TRAINING).write_bytes(b"")
    (damaged / "state.pt").unlink()
    done = bapipe("verify", saved)
    size = len(dump_training(RECORD))
    assert done.exit_code == 1
    assert sorted(done.output.splitlines()[:3]) == [
        f"{damaged} is damaged: state.pt cannot be read: No such file or directory",
        f"{damaged} is damaged: training.json has 0 bytes instead of {size}",
        f"{damaged} is damaged: weights does not match its checksum",
    ]
    assert done.output.count("all as they were written") == 2
    assert bapipe("verify", saved, "--step", "2").exit_code == 0
    assert bapipe("verify", saved, "--step", "3").exit_code == 1
    assert bapipe("verify", damaged).exit_code == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 5000])
def test_a_manifest_that_is_none_is_damage(saved: Path, content: bytes) -> None:
    (saved / "step-00000002" / MANIFEST).write_bytes(content)
    done = bapipe("verify", saved, "--step", "2")
    assert done.exit_code == 1
    assert done.output.startswith(f"{saved}/step-00000002 is ")
    assert "checkpoint.json" in done.output
    assert bapipe("list", saved).exit_code == 0


def test_what_is_not_there_is_said(saved: Path, tmp_path: Path) -> None:
    for command in ("list", "verify"):
        error = bapipe(command, tmp_path / "nothing").exception
        assert isinstance(error, BaPipeError)
        assert str(error) == (
            f"{tmp_path}/nothing holds no checkpoint; give a folder that bapipe run --checkpoint wrote"
        )
    error = bapipe("verify", saved, "--step", "7").exception
    assert str(error) == f"{saved} has no checkpoint of step 7; it has those of 1, 2, 3"


def test_the_export_of_plans_takes_a_checkpoint_as_it_did(saved: Path) -> None:
    listed = CliRunner().invoke(cli, ["--help"]).output
    assert "  checkpoint " in listed
    assert "  export " in listed
    old = CliRunner().invoke(cli, ["export", "--help"])
    assert old.exit_code == 0
    assert "CHECKPOINT" in old.output
    assert isinstance(CliRunner().invoke(cli, ["export", str(saved / "x"), "out"]).exception, BaPipeError)

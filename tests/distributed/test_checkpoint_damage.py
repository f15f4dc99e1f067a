"""Checkpoints that came to harm never load, and are never replaced or removed; two runs never write one folder."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from checkpoint_corruptions import KINDS, corrupt  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from elastic_runs import ENVIRONMENT, run, states, tiny_plan  # noqa: E402
from forked_ranks import read_results, start  # noqa: E402
from made_checkpoints import made, names, of_schema  # noqa: E402

from bapipe.cli import cli  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import write_plan  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_checks import check_saving  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_files import HashingStream  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_folder import begin_checkpoint, candidates, keep_last, set_aside  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_lock import FolderLock  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_manifest import (  # noqa: E402
    MANIFEST,
    METADATA,
    CheckpointError,
    UnknownSchemaError,
    read_manifest,
)
from bapipe.torch.checkpoint.checkpoint_options import Saving  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_reader import CheckpointReader  # noqa: E402
from bapipe.torch.checkpoint.whole_model import CheckpointState, export_safetensors  # noqa: E402
from bapipe.torch.runtime.materialise import open_state  # noqa: E402

HERE = Path(__file__).resolve().parent
OLD = HERE.parent / "data" / "checkpoint-1.tar.xz"
"""written by the version before there were checksums: two steps of the tiny model, four hidden units"""


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `damage_worker` has tried 40 corruptions, each kind twice."""
    return _tried(tmp_path_factory.mktemp("harmed"), 40)


def _tried(folder: Path, count: int) -> Path:
    (folder / "count.json").write_text(json.dumps({"count": count, "seed": count}))
    start(HERE / "damage_worker.py", folder, seconds=120 + count)
    return folder


def _results(folder: Path, what: str) -> list[Any]:
    """Of each rank."""
    [results] = read_results(folder, [2])
    assert all(what in result for result in results), results
    return [result[what] for result in results]


def _check_loads(folder: Path, count: int) -> None:
    loads = _results(folder, "loads")
    for first, second in zip(*loads, strict=True):
        assert first["outcome"] == second["outcome"], first
        assert first["error"] == second["error"]
        assert first["outcome"] in ("refused", "went back", "same"), first
        assert first["export"] in ("refused", "same"), first
        assert first["verified"] in ("damaged", "whole"), first
        # What a newer version has written is refused, and not damaged; all else that is refused is.
        if first["outcome"] != "same" and first["kind"] != "newer schema":
            assert first["verified"] == "damaged", first
        if first["kind"] == "newer schema":
            assert first["outcome"] == "refused", first
        assert "\n" not in first["error"]
        if first["outcome"] == "went back":
            assert [line.startswith("skipped a checkpoint: ") for line in first["said"]] == [True], first
    counts = Counter(load["outcome"] for load in loads[0])
    print(dict(counts), dict(Counter(load["export"] for load in loads[0])))
    assert len(loads[0]) == count
    assert {load["kind"] for load in loads[0]} == set(KINDS)
    assert counts["went back"] > count // 4


def test_no_damaged_checkpoint_loads(harmed: Path) -> None:
    """On two ranks: refused on both, or the checkpoint before it is loaded on both; the same on one device."""
    _check_loads(harmed, 40)


@pytest.mark.slow
def test_none_of_a_thousand_damaged_checkpoints_loads(tmp_path: Path) -> None:
    _check_loads(_tried(tmp_path, 1000), 1000)


def test_training_goes_on_from_the_last_one_that_is_whole(harmed: Path) -> None:
    """The damaged one is neither loaded nor removed, and its step is saved again."""
    damaged = f"{harmed}/onward/step-00000003 is damaged: __1_0.distcp does not match its checksum"
    first, second = _results(harmed, "onward")
    assert (first["step"], first["same"], second["step"], second["same"]) == (2, True, 2, True)
    assert first["said"] == [
        f"skipped a checkpoint: {damaged}",
        f"a damaged checkpoint of step 3 was in the way; it is {harmed}/onward/damaged-step-00000003 now",
    ]
    steps = [f"step-{step:08d}" for step in (1, 2, 3)]
    assert names(harmed / "onward") == ["damaged-step-00000003", *steps]
    whole = states(harmed / "a")
    assert all(torch.equal(value, whole[name]) for name, value in states(harmed / "onward").items())


def test_training_does_not_start_again_where_all_are_damaged(harmed: Path) -> None:
    for lost in _results(harmed, "lost"):
        assert lost["error"] == [
            "CheckpointError",
            f"none of the 3 checkpoints in {harmed}/lost can be read; give another folder to train from the start",
        ]
    assert len(_results(harmed, "lost")[0]["said"]) == 3
    assert names(harmed / "lost") == names(harmed / "a")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old" / "step-00000002"


def test_a_checkpoint_without_checksums_loads_and_says_so(old: Path) -> None:
    said: list[str] = []
    state = CheckpointState(old, say=said.append)
    assert said == [
        f"{old} was written by an earlier version and has no checksums: whether it is damaged cannot be verified; "
        "the next save has them"
    ]
    assert float(state["head.bias"].double().sum()) == 2.298711307346821
    assert sum(1 for _ in state.optimizer()) == 12 * 3


def test_damage_that_no_checksum_finds_raises_no_foreign_error(old: Path, tmp_path: Path) -> None:
    chance = random.Random(2)
    other = tmp_path / "other" / "step-00000001"
    shutil.copytree(old, other)
    refused = []
    for _ in range(150):
        work = tmp_path / "work" / old.name
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(old, work)
        done = corrupt(chance, work, [other])
        try:
            state = CheckpointState(work, say=lambda _: None)
            values = [*state.values(), *state.optimizer()]
            assert values, done
        except BaPipeError as error:
            refused.append(str(error))
    assert len(refused) > 75
    assert not any("\n" in text for text in refused)


class _Runs:
    """What would run if it were unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._file),))


def test_nothing_in_a_checkpoint_is_run(old: Path, tmp_path: Path) -> None:
    made_by_it = tmp_path / "made"
    data = pickle.dumps(_Runs(made_by_it))
    (old / METADATA).write_bytes(data)
    manifest = json.loads((old / MANIFEST).read_text())
    manifest["files"][METADATA] = len(data)
    (old / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"\.metadata is no index of tensors \(Unpickling.*: it holds posix"):
        CheckpointReader(old)
    assert not made_by_it.exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_an_export_is_of_a_whole_checkpoint(harmed: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(harmed / "a", tmp_path / "saved")
    last, out = saved / "step-00000003", tmp_path / "model.safetensors"
    _flip(last / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp does not match its checksum; use another one"):
        export_safetensors(last, out)
    assert not out.exists()
    done = CliRunner().invoke(cli, ["export", str(saved), str(out)])
    assert done.stdout == f"wrote {out} from {saved}/step-00000002\n"
    assert f"bapipe: skipped a checkpoint: {last} is damaged: __0_0.distcp" in done.stderr
    # Each rank reads it for itself, so none goes on without the others.
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        dict(open_state(saved))


def test_an_unknown_schema_is_neither_passed_over_nor_replaced(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for step in (1, 3, 5):
        made(saved, step)
    of_schema(saved / "step-00000005", "bapipe.checkpoint/3")
    content = (saved / "step-00000005" / MANIFEST).read_bytes()
    told = (
        f"{saved}/step-00000005 has schema 'bapipe.checkpoint/3', this version of BaPipe reads bapipe.checkpoint/2"
    )
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    for how in ((), ("--resume",)):
        done = run(tmp_path / "plan.json", "--checkpoint", str(saved), *how)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"bapipe: {told}; it is not replaced: use the version that wrote it, or give another folder\n"
        )
    said: list[str] = []
    with pytest.raises(UnknownSchemaError, match="use the version that wrote it"):
        list(candidates(saved, said.append))
    for step in (4, 5):
        with pytest.raises(BaPipeError, match=f"so this training cannot save step {step} beside it"):
            begin_checkpoint(saved, step)
    made(saved, 6)
    keep_last(saved, 1)
    assert names(saved) == ["step-00000005", "step-00000006"]
    assert (saved / "step-00000005" / MANIFEST).read_bytes() == content


def test_an_edited_schema_is_damage_and_no_other_version(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, 3)
    manifest = checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace("bapipe.checkpoint/2", "bapipe.checkpoint/3"))
    said: list[str] = []
    assert list(candidates(tmp_path, said.append)) == []
    what = "the content of checkpoint.json does not match its checksum"
    assert said == [f"skipped a checkpoint: {checkpoint} is damaged: {what}"]


def test_what_cannot_be_read_is_kept_and_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        made(tmp_path, step)
    (tmp_path / "step-00000002" / "weights").unlink()
    (tmp_path / "step-00000005" / MANIFEST).write_text("{}")
    keep_last(tmp_path, 2, besides={tmp_path / "step-00000004"})
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 3, 4, 5)]
    keep_last(tmp_path, 1)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (2, 4, 5)]


def test_a_damaged_one_is_set_aside_for_its_step(tmp_path: Path) -> None:
    assert set_aside(tmp_path, 3) is None
    for name in ("damaged-step-00000003", "damaged-step-00000003-2"):
        (made(tmp_path, 3) / "weights").write_bytes(b"")
        partial = begin_checkpoint(tmp_path, 3)
        assert set_aside(tmp_path, 3) == tmp_path / name
        partial.rmdir()
    assert names(tmp_path) == ["damaged-step-00000003", "damaged-step-00000003-2"]
    whole = made(tmp_path, 4)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="was written by another run meanwhile"):
            set_aside(tmp_path, 4)
        of_schema(whole, "bapipe.checkpoint/3")
    assert set_aside(tmp_path, 4, besides={whole}) == tmp_path / "damaged-step-00000004"


def test_a_new_run_is_refused_beside_a_damaged_checkpoint(tmp_path: Path) -> None:
    (made(tmp_path, 3) / "weights").write_bytes(b"")
    with pytest.raises(BaPipeError, match="it is not replaced: give --resume"):
        check_saving(Saving(folder=tmp_path, every=1))
    check_saving(Saving(folder=tmp_path, every=1, resume=True))


def test_a_stream_is_hashed_as_it_is_written(tmp_path: Path) -> None:
    import hashlib

    told: list[tuple[str, int, str]] = []
    parts = [b"a", b"", bytes(300_000), torch.arange(200_000).numpy(), b"z" * 1000]
    with HashingStream(tmp_path / "file", lambda *all_of_it: told.append(all_of_it)) as stream:
        for part in parts:
            stream.write(part)
        assert stream.tell() == 1 + 300_000 + 1_600_000 + 1000
        os.fsync(stream.fileno())
        assert (tmp_path / "file").stat().st_size == stream.tell()
    content = (tmp_path / "file").read_bytes()
    assert told == [("file", len(content), hashlib.sha256(content).hexdigest())]
    with pytest.raises(FileExistsError):
        HashingStream(tmp_path / "file", lambda *_: None)


@pytest.mark.parametrize("waiting", [0, 2**20, 128 * 2**20])
def test_what_is_hashed_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    """The caller's memory is its own again after each write, however much still waits to be hashed."""
    import hashlib

    monkeypatch.setattr("bapipe.torch.checkpoint.checkpoint_files._MOST_COPIED", waiting)
    chance, told = random.Random(waiting), []
    with HashingStream(tmp_path / "file", lambda *all_of_it: told.append(all_of_it)) as stream:
        for _ in range(40):
            data = bytearray(chance.randbytes(8)) * chance.choice([1, 100, 40_000, 300_000, 1_500_000])
            stream.write(data)
            data[:] = bytes(len(data))
    content = (tmp_path / "file").read_bytes()
    assert told == [("file", len(content), hashlib.sha256(content).hexdigest())]


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "model.safetensors.index.json"])
def test_a_state_file_that_cannot_be_read_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    for content in (b"", b"\xff" * 100, b"{}", b"[]", b"PK\x03\x04" + bytes(200)):
        (tmp_path / name).write_bytes(content)
        source = tmp_path if name.endswith("json") else tmp_path / name
        with pytest.raises(BaPipeError, match=r"cannot be read|not valid JSON|not text") as caught:
            open_state(source)
        assert "\n" not in str(caught.value)


_HOLD = """
import sys, os, time
from bapipe.torch.checkpoint.checkpoint_lock import FolderLock
lock = FolderLock(sys.argv[1])
child = os.fork()
if child == 0:  # as a data loader's process, which may outlive its parent
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_one_process_writes_a_folder_and_its_end_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(BaPipeError) as caught:
            FolderLock(tmp_path, patience=0.2)
        assert str(caught.value).startswith(f"another run writes into {tmp_path}: process {holder.pid} on ")
        assert str(caught.value).endswith("; wait for it, end it, or give another folder")
        holder.kill()
        holder.wait()
        lock = FolderLock(tmp_path)
        again = FolderLock(tmp_path)
        lock.release()
        assert _is_held(tmp_path)
        again.release()
        assert not _is_held(tmp_path)
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
        holder.wait()


def _is_held(folder: Path) -> bool:
    question = (
        "import sys; from bapipe.torch.checkpoint.checkpoint_lock import FolderLock; "
        "FolderLock(sys.argv[1], patience=0)"
    )
    asked = subprocess.run([sys.executable, "-c", question, str(folder)], env=ENVIRONMENT, capture_output=True)
    assert asked.returncode == 0 or b"another run writes into" in asked.stderr
    return asked.returncode != 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json and the checkpoints of 2 and 4 steps in saved."""
    folder = tmp_path_factory.mktemp("trained")
    write_plan(tiny_plan(2), folder / "plan.json")
    done = run(folder / "plan.json", "--steps", "4", "--every", "2", "--checkpoint", str(folder / "saved"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "saved", tmp_path / "saved")
    shutil.copyfile(trained / "plan.json", tmp_path / "plan.json")
    return tmp_path / "saved"


@pytest.mark.slow
def test_a_run_goes_on_from_the_last_one_that_is_whole(saved: Path, tmp_path: Path) -> None:
    wanted = states(saved)
    _flip(saved / "step-00000004" / "__1_0.distcp")
    options = ("--steps", "4", "--every", "1", "--checkpoint", str(saved), "--resume")
    done = run(tmp_path / "plan.json", *options)
    assert done.returncode == 0, done.stderr
    damaged = f"{saved}/step-00000004 is damaged: __1_0.distcp does not match its checksum"
    assert done.stderr.splitlines() == [
        f"rank 0: bapipe: skipped a checkpoint: {damaged}",
        f"rank 0: bapipe: a damaged checkpoint of step 4 was in the way; it is {saved}/damaged-step-00000004 now",
    ]
    assert f"goes on from {saved}/step-00000002, after 2 steps" in done.stdout
    assert names(saved) == ["damaged-step-00000004", "step-00000003", "step-00000004"]
    found = states(saved)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


@pytest.mark.slow
def test_a_checkpoint_of_a_larger_model_is_refused(saved: Path, tmp_path: Path) -> None:
    """All names that the smaller model has are there, in the same shapes."""
    plan = tiny_plan(2)
    manifest = json.loads((saved / "step-00000004" / MANIFEST).read_text())
    assert manifest["model"]["args"]["layers"] == 6
    smaller = json.loads((tmp_path / "plan.json").read_text())
    smaller["model"]["args"]["layers"] = 5
    for stage in smaller["stages"]:
        if "layer4" in stage["layers"]:
            stage["layers"].remove("layer4")
            stage["last_layer"] -= 1
    assert smaller["stages"][-1]["layers"] == ["layer3", "head"]
    assert plan.stages[-1].layers == ("layer3", "layer4", "head")
    (tmp_path / "smaller.json").write_text(json.dumps(smaller))
    done = run(tmp_path / "smaller.json", "--steps", "6", "--checkpoint", str(saved), "--resume")
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"bapipe: {saved}/step-00000004 has tensors that the model here lacks; give a checkpoint of this model\n"
    )


@pytest.mark.slow
def test_a_run_does_not_write_where_another_does(tmp_path: Path) -> None:
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    lock = FolderLock(tmp_path / "saved")
    try:
        done = run(tmp_path / "plan.json", "--steps", "2", "--checkpoint", str(tmp_path / "saved"))
    finally:
        lock.release()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"bapipe: another run writes into {tmp_path}/saved: process {os.getpid()} on ")
    assert done.stderr.count("\n") == 1
    assert names(tmp_path / "saved") == []


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_without_checksums(old: Path, tmp_path: Path) -> None:
    write_plan(tiny_plan(2, hidden=4), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--steps", "3", "--checkpoint", str(old.parent), "--keep", "1", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"bapipe: {old} was written by an earlier version and has no checksums" in done.stderr
    assert f"goes on from {old}, after 2 steps" in done.stdout
    # Only what this version wrote is removed to keep one.
    assert names(old.parent) == ["step-00000002", "step-00000003"]
    assert read_manifest(old.parent / "step-00000003").verified

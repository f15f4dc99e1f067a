"""Checkpoints: saved under one plan and loaded under another, complete or not there at all, and exported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from checkpoint_worker import HALF, LEGS, make_module  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from elastic_runs import run, states, tiny_plan  # noqa: E402
from made_checkpoints import made, names  # noqa: E402
from run_plans import ROOT  # noqa: E402

from bapipe.cli import cli  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import write_plan  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_folder import begin_checkpoint, find_checkpoint, keep_last, latest  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_manifest import MANIFEST, UnreadableCheckpointError, read_manifest  # noqa: E402
from bapipe.torch.checkpoint.checkpoints import Checkpoints  # noqa: E402
from bapipe.torch.checkpoint.whole_model import CheckpointState, export_safetensors  # noqa: E402
from bapipe.torch.inputs.build_model import build_model  # noqa: E402
from bapipe.torch.runtime.materialise import fill, open_state  # noqa: E402
from bapipe.torch.runtime.pipeline import Pipeline  # noqa: E402
from command import refused  # noqa: E402
from quick_script import QUICK_SCRIPT  # noqa: E402

HERE = Path(__file__).resolve().parent
PATHS = [
    (model, *ways)
    for model, (first, *others) in LEGS.items()
    for ways in (
        *((first.name, leg.name) for leg in (first, *others)),
        *((leg.name, first.name) for leg in others),
    )
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `checkpoint_worker` has trained all of LEGS."""
    folder = tmp_path_factory.mktemp("trained")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, QUICK_SCRIPT, str(HERE / "checkpoint_worker.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("model, first, second", PATHS)
def test_what_is_loaded_is_what_was_saved(trained: Path, model: str, first: str, second: str) -> None:
    """To the bit, however the model was and is cut; the scheduler, the groups and the place in the data too."""
    saved, loaded = trained / model / f"{first}-half", trained / model / f"{first}-{second}-again"
    wanted, found = states(saved), states(loaded)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    before, after = (torch.load(find_checkpoint(path) / "state.pt", weights_only=True) for path in (saved, loaded))
    assert after["data"] == before["data"] == {"place": HALF}
    assert after["scheduler"] == before["scheduler"]
    options = [
        {name: group["options"] for group in item["groups"] for name in group["names"]} for item in (before, after)
    ]
    assert options[0] == options[1]


@pytest.mark.parametrize("model, first, second", PATHS)
def test_training_goes_on_as_if_nothing_had_happened(trained: Path, model: str, first: str, second: str) -> None:
    """Six steps straight on are three under one plan and three under another.

    Under the same plan to the bit; under another one sums of float64 have another order, which shows most in a
    bias that began at zero: terms that cancel have made all of it.
    """
    wanted, found = states(trained / model / "straight"), states(trained / model / f"{first}-{second}")
    assert wanted.keys() == found.keys()
    if first == second:
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
        return
    for name, value in wanted.items():
        if name.startswith("optimizer "):
            continue
        largest = float(value.double().abs().max())
        difference = float((found[name].double() - value.double()).abs().max())
        assert difference <= 1e-11 * largest, f"{name}: {difference / largest}"


@pytest.mark.parametrize("model", LEGS)
def test_random_generators_go_on(trained: Path, model: str) -> None:
    first = LEGS[model][0]
    for rank in range(first.schedule.num_ranks):
        straight, later = (
            json.loads((trained / model / f"draws-{name}-{rank}.json").read_text())
            for name in ("straight", f"{first.name}-{first.name}")
        )
        assert later == straight[HALF:]


@pytest.mark.parametrize("model", LEGS)
def test_only_the_last_is_kept(trained: Path, model: str) -> None:
    for leg in LEGS[model]:
        assert names(trained / model / f"{leg.name}-half") == [f"step-{HALF:08d}"]


@pytest.mark.parametrize("model, split", [("gnmt", "zb4-vocabulary"), ("gpt2", "gpipe4"), ("resnet", "so3-split")])
def test_one_file_has_the_whole_model(trained: Path, tmp_path: Path, model: str, split: str) -> None:
    """Parts are put together, tied weights have all their names, and what no stage uses is there."""
    checkpoint, out = trained / model / f"{split}-half", tmp_path / "model.safetensors"
    done = CliRunner().invoke(cli, ["export", str(checkpoint), str(out)])
    assert done.output == f"wrote {out} from {checkpoint}/step-{HALF:08d}\n"
    module = make_module(model)
    state = open_state(out)
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    assert set(state) == set(wanted)
    module.load_state_dict(dict(state), strict=True)
    found = module.state_dict()
    assert any(not torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(found["never_used"], wanted["never_used"])
    assert torch.equal(found["note"], wanted["note"])
    folder = open_state(checkpoint)
    assert all(torch.equal(folder[name], found[name]) for name in wanted)
    with torch.device("meta"):
        hollow = make_module(model)
    fill(hollow, [name for name, _ in hollow.named_parameters()], folder)
    assert all(torch.equal(parameter, found[name]) for name, parameter in hollow.named_parameters())


def test_an_export_that_cannot_be_written_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(BaPipeError, match="cannot be written: No such file or directory"):
        export_safetensors(trained / "gnmt" / "straight", tmp_path / "missing" / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_last_complete_one_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") is None
    first, second = made(tmp_path, 2), made(tmp_path, 10)
    (tmp_path / ".partial-00000012").mkdir()
    assert latest(tmp_path) == second
    (second / "weights").write_bytes(b"123")
    assert latest(tmp_path) == first
    with pytest.raises(UnreadableCheckpointError, match="weights has 3 bytes instead of 5"):
        read_manifest(second)
    (first / MANIFEST).unlink()
    assert latest(tmp_path) is None
    with pytest.raises(BaPipeError, match="weights has 3 bytes instead of 5"):
        find_checkpoint(tmp_path)
    with pytest.raises(BaPipeError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path / "missing")


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    for name in (".partial-00000003", ".removed-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    again = made(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003"]
    assert read_manifest(again).step == 3


def test_another_trainings_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    kept = made(tmp_path, 5)
    for step in (5, 4):
        with pytest.raises(BaPipeError, match=f"step-00000005 is complete, .* cannot save step {step} beside it"):
            begin_checkpoint(tmp_path, step)
    assert latest(tmp_path) == kept


def test_as_many_as_wanted_are_kept(tmp_path: Path) -> None:
    paths = [made(tmp_path, step) for step in (1, 2, 30, 200)]
    keep_last(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 5 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--async",)])
def test_a_disk_that_cannot_be_written_leaves_the_last_checkpoint(
    tmp_path: Path, small_disk: Path, how: tuple[str, ...]
) -> None:
    """A checkpoint has about 3.5 MB. Training goes on, says so, and can be resumed when there is room."""
    write_plan(tiny_plan(2, hidden=256), tmp_path / "plan.json")
    saved = small_disk / "saved"
    options = ("--checkpoint", str(saved), "--every", "2", *how)
    full = run(tmp_path / "plan.json", "--steps", "4", *options)
    missing = f"the checkpoint after 4 steps was not written to {saved}: rank "
    last = f"the last complete checkpoint is {saved}/step-00000002"
    assert full.returncode == 1
    assert full.stdout.count("\nstep 3  loss") == 1
    assert all(line.startswith(("rank 0: bapipe: ", "bapipe: all steps")) for line in full.stderr.splitlines())
    assert full.stderr.count(missing) == 2
    assert last in full.stderr.splitlines()[0]
    assert full.stderr.count("No space left on device (") == 2
    assert names(saved) == ["step-00000002"]
    assert len(CheckpointState(saved)) == 2 * 6

    subprocess.run(["mount", "-o", "remount,ro,size=12m", str(small_disk)], check=True)
    fixed = run(tmp_path / "plan.json", "--steps", "4", *options, "--resume")
    assert (fixed.returncode, fixed.stdout) == (2, "")
    assert fixed.stderr == (
        f"bapipe: checkpoints cannot be written into {saved}: Read-only file system; make it writable, or give "
        "another folder\n"
    )

    subprocess.run(["mount", "-o", "remount,rw,size=12m", str(small_disk)], check=True)
    assert run(tmp_path / "plan.json", "--steps", "4", *options, "--resume").returncode == 0
    assert run(tmp_path / "plan.json", "--steps", "4", "--checkpoint", str(tmp_path / "straight")).returncode == 0
    wanted, found = states(tmp_path / "straight"), states(saved)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_folder_that_cannot_be_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    saved = tmp_path / "file" / "saved"
    assert refused("run", str(tmp_path / "plan.json"), "--checkpoint", str(saved)) == (
        f"bapipe: checkpoints cannot be written into {saved}: Not a directory; make it writable, or give another "
        "folder\n"
    )


def test_the_library_refuses_such_a_folder_when_it_is_named(tmp_path: Path) -> None:
    """Not at the first save, hours later."""
    (tmp_path / "file").touch()
    plan = tiny_plan(1)
    built = build_model(plan.model, folders=[ROOT], precision=plan.dtype)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with Pipeline(lambda: (built.module, built.args, built.kwargs), plan, built.loss) as pipe:
            with pytest.raises(BaPipeError, match=r"cannot be written into .*/file: Not a directory"):
                Checkpoints(pipe, tmp_path / "file")
            Checkpoints(pipe, tmp_path / "new" / "saved").close()
        assert not (tmp_path / "new").exists()
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_does_not_start_beside_anothers_checkpoints(tmp_path: Path) -> None:
    made(tmp_path / "saved", 2)
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", "--checkpoint", str(tmp_path / "saved"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"bapipe: {tmp_path}/saved/step-00000002 is a checkpoint of another run; give --resume to go on from it, "
        "or another folder\n"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (("--every", "2"), "--accept-changes are about checkpoints; give their folder: --checkpoint"),
        (("--checkpoint", "x", "--every", "0"), "--every must be at least 1 step, got 0; raise it"),
        (("--checkpoint", "x", "--keep", "0"), "--keep must be at least 1 checkpoint, got 0; raise it"),
        (("--elastic", "--checkpoint", "x"), "it needs --profile and --checkpoint; give both"),
        (("--profile", "x"), "--profile is to plan again with --elastic; give that too, or leave it out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    done = run(tmp_path / "plan.json", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("bapipe: ")
    assert message in done.stderr

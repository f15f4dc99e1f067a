"""Runs started as users start them: `bapipe run`, a script of their own, two nodes, SLURM."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from run_plans import CPU, ROOT, caps_of, make_plan, small_plan, tiny_profile  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.hardware.cluster import Accelerator, Cluster, Link  # noqa: E402
from bapipe.models.layers import ModelRef  # noqa: E402
from bapipe.planner import Request, explore  # noqa: E402
from bapipe.planner import make_plan as make_planned  # noqa: E402
from bapipe.records.plan import Plan, write_plan  # noqa: E402
from bapipe.records.run_record import RunRecord, read_run, to_timeline  # noqa: E402
from bapipe.schedule.actions import Action, Kind  # noqa: E402
from bapipe.torch.inputs.build_model import build_model  # noqa: E402
from bapipe.torch.launch import worker  # noqa: E402
from bapipe.torch.launch.launcher import launch  # noqa: E402
from bapipe.torch.launch.run_options import RunOptions  # noqa: E402
from command import bapipe, refused  # noqa: E402

HERE = Path(__file__).resolve().parent
FAR_TOO_LONG = 300
"""seconds; what has not ended by then hangs"""


def _environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path, **more}


def _bapipe(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("bapipe")), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environment(),
        timeout=FAR_TOO_LONG,
        check=False,
    )


@pytest.mark.usefixtures("cold")
def test_a_run_is_checked_recorded_and_told_as_json(tmp_path: Path) -> None:
    plan = small_plan("1f1b-so", microbatches=3)
    write_plan(plan, tmp_path / "plan.json")
    options = ["--steps", "4", "--check", "--json", "--timeout", "60", "--out", str(tmp_path / "run.json")]
    result = _bapipe("run", str(tmp_path / "plan.json"), *options)
    assert (result.returncode, result.stderr) == (0, "")
    *steps, wrote, check = (json.loads(line) for line in result.stdout.splitlines())
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert wrote == {"wrote": str(tmp_path / "run.json")}
    assert check["check"]["gradient_difference"] <= check["check"]["tolerance"] == 1e-12
    record = read_run(tmp_path / "run.json")
    for told, kept in zip(steps, record.steps, strict=True):
        assert told["loss"] == kept.loss
        assert told["seconds"] == pytest.approx(kept.seconds)
        assert told["samples_per_second"] == pytest.approx(plan.global_batch / kept.seconds)
        assert told["measured_over_predicted"] == pytest.approx(kept.seconds / plan.prediction.time)
        assert 0 < told["bubble"] < 1
    assert record.recorded_step in (1, 2, 3)
    assert record.check is not None
    assert record.check.passed
    _follows(record, plan)


def test_replicas_of_two_speeds_take_their_shares_and_are_checked(tmp_path: Path) -> None:
    profile = tiny_profile()
    table = profile.table("cpu-core")
    slower = {
        name: tuple(tuple(2.5 * value for value in row) for row in getattr(table, name))
        for name in ("forward", "backward")
    }
    slow = replace(table, **slower)
    kinds = {"cpu-core": CPU, "slow-core": replace(CPU, name="slow-core")}
    cluster = Cluster(
        name="two speeds",
        accelerators=tuple(
            Accelerator(name=f"localhost/{index}", type=kind, node="localhost") for index, kind in enumerate(kinds)
        ),
        types=kinds,
        within=Link(bandwidth=1e12),
    )
    both = replace(profile, accelerators={"cpu-core": table, "slow-core": slow})
    request = Request(schedule="data-parallel", global_batch=32, microbatch=8)
    plan = make_planned(explore(both, cluster, request))
    assert plan.schedule.dealing == ((0, 0, 1),)
    write_plan(plan, tmp_path / "plan.json")
    paths = [str(tmp_path / name) for name in ("plan.json", "run.json")]
    result = _bapipe("run", paths[0], "--steps", "3", "--check", "--timeout", "60", "--out", paths[1])
    assert (result.returncode, result.stderr) == (0, "")
    record = read_run(paths[1])
    assert record.check is not None
    assert record.check.passed
    timeline = to_timeline(record)
    forwards = timeline.ranks[timeline.kinds == Kind.F].tolist()
    assert [forwards.count(rank) for rank in range(2)] == [3, 1]
    assert "rank 1" in bapipe("compare", *paths).stdout


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    write_plan(small_plan("1f1b-so"), tmp_path / "plan.json")
    paths = [str(tmp_path / name) for name in ("plan.json", "run.json")]
    result = _bapipe("run", paths[0], "--steps", "2", "--no-trace", "--check", "--out", paths[1])
    assert (result.returncode, result.stderr) == (0, "")
    assert "bubble" not in result.stdout
    record = read_run(paths[1])
    assert (record.events, record.transfers) == ((), None)
    assert record.check is not None
    assert record.check.passed
    assert refused("compare", *paths) == (
        "bapipe: the run was not traced (--no-trace), so it has no timeline; run the plan again with --trace\n"
    )
    report = bapipe("report", *paths, "-o", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stderr
    said, wrote = report.stdout.splitlines()
    assert said == "the run was not traced (--no-trace): the report shows the plan alone"
    assert wrote.startswith(f"wrote {tmp_path}/report.html, ")


def _follows(record: RunRecord, plan: Plan) -> None:
    """What was recorded is the plan's order, holds what it may, and no result is used before it is made."""
    for lane in plan.schedule.lanes:
        events = [event for event in record.events if event.rank == lane.rank]
        assert tuple(event.action for event in events) == lane.actions
        assert all(before.end <= after.start for before, after in itertools.pairwise(events))
    assert record.peak_in_flight == caps_of(plan) == tuple(to_timeline(record).peak_in_flight())
    ends = {event.action: event.end for event in record.events}
    starts = {event.action: event.start for event in record.events}
    assert record.transfers is not None
    assert len(record.transfers) == 2 * (len(plan.stages) - 1) * plan.microbatches
    for transfer in record.transfers:
        action = Action.parse(transfer.action)
        onward = 1 if action.kind.name == "F" else -1
        needed = str(replace(action, stage=action.stage + onward))
        assert ends[transfer.action] <= transfer.start <= transfer.arrival <= starts[needed]


def test_the_digits_are_learnt_and_a_line_is_printed_per_step(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    write_plan(make_plan("1f1b-so", optimizer="adam"), tmp_path / "plan.json")
    options = ["--steps", "24", "--data", "digits", "--learning-rate", "0.001"]
    result = _bapipe("run", str(tmp_path / "plan.json"), *options)
    assert (result.returncode, result.stderr) == (0, "")
    line = re.compile(
        r"step (\d+)  loss (\d\.\d{6})  \S+ (?:s|ms|µs)  \S+ samples/s  bubble \d+\.\d%  \d+\.\d\dx predicted"
    )
    lines = result.stdout.splitlines()
    # On a busy machine one of the ranks may be named for its slowness.
    found = [line.fullmatch(text) for text in lines if not text.startswith("rank ")]
    assert len(found) == 24
    losses = [float(match[2]) for match in found if match is not None]
    assert losses[-1] < 0.7 * losses[0]


def test_the_example_trains_with_a_loop_of_its_own() -> None:
    script = ["--script", "examples/train_pipeline.py", "--", "examples/plan.json", "--steps", "8"]
    result = _bapipe("launch", "examples/plan.json", *script)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < 0.7 * losses[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _all(commands: Sequence[str], environment: dict[str, str]) -> str:
    """Run shell commands at once to their end; what they wrote."""
    started = [
        subprocess.Popen(
            command,
            shell=True,
            executable="/bin/bash",
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        output = [process.communicate(timeout=FAR_TOO_LONG)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(output)
    return "\n".join(output)


def test_every_rank_is_on_the_node_that_the_plan_names(tmp_path: Path) -> None:
    """Stages go from node a to b and back, so that torchrun's numbers are not the plan's; the nodes are uneven."""
    plan = small_plan("1f1b-sno", stages=3, nodes=("a", "b"))
    write_plan(plan, tmp_path / "plan.json")
    where = ["--head", "127.0.0.1", "--port", str(_free_port())]
    script = ["--script", str(HERE / "own_loop.py"), "--", str(tmp_path / "plan.json"), str(tmp_path)]
    printed = bapipe(
        "launch", str(tmp_path / "plan.json"), "--print", *where, *script, "--steps", "2", "--environment",
        folder=ROOT,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0] == "# on a: ranks 0, 2"
    assert lines[3] == "# on b: ranks 1"
    _all([lines[1], lines[4]], _environment())
    nodes = [(tmp_path / f"node-{rank}").read_text() for rank in range(3)]
    assert nodes == ["a", "b", "a"]


def test_the_slurm_script_starts_every_node(tmp_path: Path) -> None:
    """There is no SLURM here: stand-ins give the script what SLURM would, both nodes being this machine."""
    plan = small_plan("gpipe", stages=2, nodes=("a", "b"))
    write_plan(plan, tmp_path / "plan.json")
    options = [
        "--print",
        "--port",
        str(_free_port()),
        "--steps",
        "2",
        "--check",
        "--out",
        str(tmp_path / "run 1.json"),
    ]
    printed = bapipe("launch", str(tmp_path / "plan.json"), *options, folder=ROOT)
    assert printed.returncode == 0, printed.stderr
    script = printed.stdout[printed.stdout.index("#!/bin/bash") :]
    assert "#SBATCH --nodes=2\n" in script
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1; echo 127.0.0.2\n")
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nshift\nSLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; code=$?; wait $! && exit $code\n'
    )
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    environment = _environment(SLURM_JOB_NODELIST="this[1-2]")
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    output = _all([f"bash {tmp_path}/job.sh"], environment)
    assert "gradients differ from one process on the whole global batch by at most" in output
    record = read_run(tmp_path / "run 1.json")
    assert record.world_size == 2


def test_ranks_of_several_machines_agree_on_the_time(tmp_path: Path) -> None:
    commands = [f"{sys.executable} {HERE / 'clock_worker.py'} {tmp_path} {rank}" for rank in range(3)]
    _all(commands, _environment())
    first, same, other = (json.loads((tmp_path / f"clock-{rank}.json").read_text()) for rank in range(3))
    assert first == same == 0.0
    assert other == pytest.approx(1000.0, abs=0.05)


def test_a_plan_of_several_nodes_is_not_started_here(tmp_path: Path) -> None:
    write_plan(small_plan("gpipe", stages=2, nodes=("a", "b")), tmp_path / "plan.json")
    result = bapipe("launch", str(tmp_path / "plan.json"))
    assert result.returncode == 2
    assert result.stderr == "bapipe: the plan has 2 nodes (a, b); start on each what --print writes for it\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "a run needs at least 1 step, got 0; raise --steps"),
        ({"timeout": 0.0}, "the timeout must be more than 0 s, got 0; raise --timeout"),
        ({"out": Path("no/such/folder/run.json")}, "is in a folder that does not exist; make it first"),
        (
            {"tensorboard": "board"},
            "--tensorboard needs tensorboard, which is not installed; pip install tensorboard",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_process_starts(
    tmp_path: Path, options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else find(name))
    write_plan(small_plan("gpipe"), tmp_path / "plan.json")
    with pytest.raises(BaPipeError, match=message):
        launch(tmp_path / "plan.json", RunOptions(**options))  # type: ignore[arg-type]


def test_tensorboard_gets_every_steps_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is optional")
    write_plan(small_plan("gpipe"), tmp_path / "plan.json")
    options = RunOptions(steps=2, tensorboard=tmp_path / "board", timeout=60)
    code = launch(tmp_path / "plan.json", options)
    assert code == 0
    events = next((tmp_path / "board").glob("events.out.tfevents.*")).read_bytes()
    assert all(f"bapipe/{name}".encode() in events for name in ("loss", "samples_per_second", "bubble"))


def test_a_wrong_world_size_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(small_plan("1f1b-sno", stages=3), tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker.main([str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err == (
        "bapipe: the plan needs 3 ranks, 2 were started; start it with torchrun --nproc-per-node 3, "
        "with bapipe run, or as bapipe launch --print says\n"
    )


@pytest.mark.parametrize(
    "ref, args, message",
    [
        ("examples.tiny_model", {}, "looks like package.module:function, got 'examples.tiny_model'"),
        ("no_such_model:build", {}, "'no_such_model:build' cannot be imported: No module named"),
        ("examples.tiny_model:bild", {}, r"no function 'bild' \(did you mean 'build'\?\)"),
        ("examples.tiny_model:build", {"width": 3}, r"'examples.tiny_model:build' called with \(width=3\) failed"),
        ("math:gcd", {}, r"'math:gcd' called with \(\) failed|'math:gcd' must return a module, \(module, args\)"),
    ],
)
def test_a_reference_that_builds_no_model_is_refused(ref: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        build_model(ModelRef(name="x", ref=ref, args=dict(args)), folders=[ROOT])

"""Runs that fail: every rank ends, and says on one line which rank, host, stage and action it was, and why."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from elastic_runs import COMMAND, ENVIRONMENT, ranks_of, tiny_plan  # noqa: E402
from run_plans import ROOT, fragile_plan, small_plan  # noqa: E402

from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import Plan, write_plan  # noqa: E402
from bapipe.torch import Pipeline  # noqa: E402
from bapipe.torch.health.failure import RunError  # noqa: E402
from bapipe.torch.inputs.build_model import build_model  # noqa: E402
from bapipe.torch.inputs.training_data import batches_for  # noqa: E402
from bapipe.torch.launch.launcher import launch  # noqa: E402
from bapipe.torch.launch.run_options import RunOptions  # noqa: E402

HERE = Path(__file__).resolve().parent
HOST = re.escape(socket.gethostname())
FAR_TOO_LONG = 240
"""seconds; a run that has not ended by then hangs"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", r"was killed by SIGKILL; rank [02] noticed"),
        (
            "raise",
            r"ValueError: the layer broke \(.*fragile_model.py:\d+\), in layer 'second', micro-batch \d, "
            r"given \(2, 4\) float64",
        ),
        ("stop", r"does not answer; rank [02] waited 10 s"),
        ("exit", r"SystemExit: the layer leaves \(.*fragile_model.py:\d+\)"),
        pytest.param(
            "interrupt",
            r"KeyboardInterrupt: the layer leaves \(.*fragile_model.py:\d+\)",
            marks=pytest.mark.slow,
        ),
        pytest.param("leave", r"Leaving: the layer leaves \(.*fragile_model.py:\d+\)", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_a_run_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT / 'src'}")
    write_plan(fragile_plan(how, tmp_path / "note"), tmp_path / "plan.json")
    options = RunOptions(steps=1000, timeout=10 if how == "stop" else FAR_TOO_LONG)
    code = launch(tmp_path / "plan.json", options)
    assert code == 1
    assert time.time() - float((tmp_path / "note").read_text()) < FAR_TOO_LONG / 4
    said = capfd.readouterr().err.splitlines()
    # torch itself warns where the machine's name cannot be looked up in time.
    line, *table = [text for text in said if "The hostname of the client socket" not in text]
    assert re.fullmatch(rf"bapipe: rank 1 on {HOST}, stage 1, action 1F\d of step \d+: {reason}", line)
    if how != "stop":
        assert table == []
        return
    assert table[0].split() == ["rank", "stage", "host", "at", "waits", "for", "for", "heard"]
    assert [row.split()[0] for row in table[1:]] == ["0", "1", "2"]
    assert "rank 1 (1B" in table[1]
    assert re.search(r"action 1F\d of step \d+ +not known .* ago$", table[2])
    # A rank that stops may hold back what it had to pass on of the step's announcement.
    assert re.search(r"rank 1 \(1F|hearing of the batch", table[3])


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("kill", 1, rf"rank 1 on {HOST}, stage 1, [a-z ]+: was killed by SIGKILL(; rank [02] noticed)?"),
        (
            "exit",
            2,
            r"'fragile_model:build' called with \(.*\) failed: SystemExit: the layer leaves; correct it or .*",
        ),
    ],
)
def test_a_rank_that_ends_while_it_builds_its_model_is_the_one_that_is_named(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    code: int,
    line: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT / 'src'}")
    write_plan(fragile_plan(how, tmp_path / "note", place="build"), tmp_path / "plan.json")
    assert launch(tmp_path / "plan.json", RunOptions(steps=3, timeout=FAR_TOO_LONG)) == code
    assert time.time() - float((tmp_path / "note").read_text()) < FAR_TOO_LONG / 4
    said = capfd.readouterr().err.splitlines()
    assert re.fullmatch(rf"bapipe: {line}", said[-1]), said


def test_two_ranks_that_are_stopped_at_once_are_both_named_in_time(tmp_path: Path) -> None:
    """The others know after the timeout, and nobody waits for ranks that cannot hear."""
    timeout = 10
    write_plan(tiny_plan(3), tmp_path / "plan.json")
    command = [*COMMAND, str(tmp_path / "plan.json"), "--steps", "1000000", "--timeout", str(timeout)]
    # So long a launcher waits for a rank that does not end: half a minute would not tell it from a busy machine.
    environment = {**ENVIRONMENT, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(4 * FAR_TOO_LONG)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("step 3 "):
                assert process.poll() is None
            ranks = ranks_of(process.pid)
            stopped = time.monotonic()
            for rank in (1, 2):
                os.kill(ranks[rank], signal.SIGSTOP)
            error = process.communicate(timeout=FAR_TOO_LONG)[1]
            took = time.monotonic() - stopped
        finally:
            process.kill()
    first, *table = error.splitlines()
    named = r"rank ([12]) on .*: does not answer, nor does rank ([12]); rank 0 waited 10 s"
    found = re.fullmatch(rf"bapipe: {named}", first)
    assert found is not None, error
    assert sorted(found.groups()) == ["1", "2"], error
    assert len(table) == 4
    assert process.returncode == 1
    assert took < FAR_TOO_LONG, error


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Any]:
    """Starts ranks of tests/distributed/own_loop.py and waits for them; ends them all, come what may."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, ranks: int) -> subprocess.Popen[str]:
        write_plan(small_plan("1f1b-so", stages=ranks), tmp_path / "plan.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks), str(HERE / "own_loop.py"), str(tmp_path / "plan.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(
            subprocess.Popen(
                [*command, str(tmp_path), *options],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[0]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _stepped(folder: Path, process: subprocess.Popen[str], ranks: int) -> dict[int, int]:
    """The ranks' process numbers, once all of them train."""
    end = time.monotonic() + FAR_TOO_LONG
    while not all((folder / f"stepped-{rank}").exists() for rank in range(ranks)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    return {rank: int((folder / f"pid-{rank}").read_text()) for rank in range(ranks)}


def _lines(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    """What BaPipe said on standard error, and all of it, once torchrun has ended."""
    error = process.communicate(timeout=FAR_TOO_LONG)[1]
    return [line for line in error.splitlines() if line.startswith("bapipe: ")], error


def test_a_killed_rank_ends_a_users_own_script_on_every_rank(tmp_path: Path, torchrun: Any) -> None:
    """Rank 0 is busy with something else for ten minutes: it is told, too."""
    process = torchrun("--slow", "0", ranks=3)
    ranks = _stepped(tmp_path, process, 3)
    os.kill(ranks[1], signal.SIGKILL)
    lines, error = _lines(process)
    assert process.returncode == 1
    assert len(lines) == 2, error
    assert len(set(lines)) == 1
    places = r"(action 1[FB]\d of|summing the loss,|hearing of the batch,|after) step \d+"
    located = rf"rank 1 on {HOST}, stage 1, {places}"
    assert re.match(rf"bapipe: {located}: has ended or cannot be reached; rank [02] noticed at ", lines[0])
    assert "[rank" not in error, "another rank's failure needs no traceback"


def test_a_stopped_rank_is_found_though_all_wait_for_each_other(tmp_path: Path, torchrun: Any) -> None:
    """The script's own process group would wait for half an hour."""
    process = torchrun("--timeout", "10", "--own-group", ranks=3)
    ranks = _stepped(tmp_path, process, 3)
    os.kill(ranks[2], signal.SIGSTOP)
    lines, error = _lines(process)
    assert len(lines) == 2, error
    assert len(set(lines)) == 1
    assert re.match(rf"bapipe: rank 2 on {HOST}, stage 2, .*: does not answer; rank \d waited 10 s", lines[0])
    assert error.count("waits for") == 1
    assert not Path(f"/proc/{ranks[2]}").exists(), "torchrun would have waited for it"


def test_a_global_batch_other_than_planned_is_refused_by_every_rank(torchrun: Any) -> None:
    process = torchrun("--samples", "33", ranks=2)
    _, error = _lines(process)
    assert process.returncode == 1
    said = "the batch has 33 samples, the plan is for a global batch of 32; give 1 to 32"
    assert all(f"[rank{rank}]: bapipe.errors.BaPipeError: {said}" in error for rank in range(2)), error


def _pipeline(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Pipeline, Any]:
    monkeypatch.syspath_prepend(str(HERE))
    built = build_model(plan.model, folders=[ROOT], precision=plan.dtype)
    pipe = Pipeline(lambda: (built.module, built.args, built.kwargs), plan, built.loss, seed=None)
    return pipe, batches_for(built, "synthetic", global_batch=plan.global_batch, seed=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("forward", r"0F\d of step 0: ValueError: .*, in layer 'second', micro-batch \d, given \(2, 4\) float64"),
        (
            "backward",
            r"0B\d of step 0: ValueError: .*fragile_model.py:\d+\), in layers 'first' to 'third', micro-batch \d",
        ),
        (
            "loss",
            r"0F\d of step 0: ValueError: .*, in the loss, micro-batch \d, "
            r"given \(2, 2\) float64, \(2, 2\) float64",
        ),
        (
            "look-up",
            r"0F0 of step 0: IndexError: index out of range in self, in layer 'second' at .*fragile_model.py:\d+, "
            r"micro-batch 0, given \(5, 4\) float64, \(2,\) int64",
        ),
    ],
)
def test_an_exception_names_layer_micro_batch_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, message: str
) -> None:
    plan = fragile_plan("raise", tmp_path / "note", stages=1, place=place, at=1000)
    pipe, batches = _pipeline(plan, monkeypatch)
    # Only now, because the capture runs the model, too.
    sys.modules["fragile_model"].asked["left"] = 2
    inputs, target = batches(0)
    with pytest.raises(RunError, match=rf"^rank 0 on {HOST}, stage 0, action {message}$"):
        pipe.step(inputs + 1000 if place == "look-up" else inputs, target)
    pipe.close()


@pytest.mark.usefixtures("alone")
def test_what_is_not_planned_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan("gpipe", stages=1)
    pipe, batches = _pipeline(plan, monkeypatch)
    inputs, targets = batches(0)
    for wrong, message in (
        (
            (torch.cat([inputs, inputs[:1]]), targets),
            r"has 33 samples, the plan is for a global batch of 32; give 1",
        ),
        ((inputs, targets[:-1]), r"the target has 31 samples, the inputs have 32; give as many of both"),
        ((inputs.float(), targets), r"input 0 is float32, the model was captured with float64; convert it"),
        ((inputs[:, 1:], targets), r"input 0 has shape \(32, 63\), the model was captured for \(32, 64\); give"),
        ((None, targets), r"rank 0 needs the inputs, got None; give every rank the global batch"),
    ):
        with pytest.raises(BaPipeError, match=message):
            pipe.step(*wrong)
    assert pipe.steps == 0
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.step(inputs, targets)
    pipe.close()


@pytest.mark.usefixtures("alone")
def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan("gpipe", stages=1)
    other = replace(plan.model, args={**plan.model.args, "layers": 5})
    with pytest.raises(BaPipeError, match=r"6 layers and .* 5: where the plan has 'layer4' the model has 'head'"):
        _pipeline(replace(plan, model=other), monkeypatch)
    with pytest.raises(BaPipeError, match=r"fingerprint .* but the plan is of abc: .*; profile and plan it again"):
        _pipeline(replace(plan, model=replace(plan.model, fingerprint="abc")), monkeypatch)
    built = build_model(plan.model, folders=[ROOT], precision="fp32")
    with pytest.raises(BaPipeError, match=r"the plan is for fp64, but 'layer0.0.weight' is float32; convert"):
        Pipeline(lambda: (built.module, built.args, built.kwargs), plan, built.loss)
    half = replace(plan, dtype="bf16")
    with pytest.raises(
        BaPipeError, match=r"is for bf16, but .* is float32; convert the model, run it under autocast"
    ):
        Pipeline(lambda: (built.module, built.args, built.kwargs), half, built.loss)
    Pipeline(lambda: (built.module, built.args, built.kwargs), half, built.loss, autocast=torch.bfloat16).close()
    with pytest.raises(BaPipeError, match=r"the plan needs 3 ranks, 1 were started; start it with torchrun"):
        _pipeline(small_plan("gpipe", stages=3), monkeypatch)

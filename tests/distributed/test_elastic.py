"""Ranks that are killed at any moment: the run goes on from a complete checkpoint, on all accelerators or less."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from elastic_runs import COMMAND, ENVIRONMENT, PROFILE, descendants, ranks_of, run, states, tiny_plan  # noqa: E402
from made_checkpoints import names  # noqa: E402

from bapipe.costs.profile import read_profile  # noqa: E402
from bapipe.costs.profile_ways import join_ways  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import Plan, read_plan, write_plan  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_folder import latest  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_manifest import read_manifest  # noqa: E402
from bapipe.torch.launch.elastic import describe_change, plan_without, without_accelerator  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finding the ranks of a run needs /proc")

PATIENCE = 300.0


class _Run:
    """A run under way, which leaves a busy machine to this process: it must not end before a rank is killed."""

    def __init__(self, plan: Path, saved: Path, *options: str) -> None:
        self.saved, self.output = saved, plan.parent / "output"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", *COMMAND, str(plan), "--checkpoint", str(saved), *options],
                cwd=plan.parent,
                env=ENVIRONMENT,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    @property
    def step(self) -> int:
        """Of the last complete checkpoint."""
        found = latest(self.saved)
        return 0 if found is None else read_manifest(found).step

    def until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.002)

    def kill(self, rank: int) -> None:
        """As the kernel would, with no chance to say a word."""
        self.until(lambda: rank in ranks_of(self.process.pid))
        os.kill(ranks_of(self.process.pid)[rank], signal.SIGKILL)

    def finish(self) -> str:
        try:
            assert self.process.wait(timeout=PATIENCE) == 0, self.output.read_text()
        finally:
            self.end()
        return self.output.read_text()

    def end(self) -> None:
        """With torchrun, which would start the ranks again, and all else that it has started."""
        if self.process.poll() is None:
            for process in (self.process.pid, *descendants(self.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.wait()


def _writing(saved: Path) -> bool:
    return any(path.name.startswith(".partial-") for path in saved.iterdir())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The checkpoints of all steps of a run of three ranks of which none was killed."""
    made: dict[int, Path] = {}

    def folder(steps: int) -> Path:
        if steps not in made:
            made[steps] = tmp_path_factory.mktemp("calm")
            write_plan(tiny_plan(3), made[steps] / "plan.json")
            options = ["--steps", str(steps), "--every", "1", "--keep", str(steps), "--timeout", "60"]
            done = run(made[steps] / "plan.json", *options, "--checkpoint", str(made[steps] / "saved"))
            assert done.returncode == 0, done.stderr
        return made[steps] / "saved"

    return folder


SHORT = 18
"""steps of the run that is killed once"""


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, kills: int, calm: Callable[[int], Path]
) -> None:
    """Ranks are killed by chance: while they train, while a checkpoint is written, and while they start."""
    chance = random.Random(kills)
    write_plan(tiny_plan(3), tmp_path / "plan.json")
    steps = 6 * (kills - 1) + SHORT
    options = ["--steps", str(steps), "--every", "1", "--timeout", "60"]
    saved = tmp_path / "saved"
    how = ["--async"] if kills % 2 else []
    going = _Run(tmp_path / "plan.json", saved, *options, *how, "--restarts", str(kills))
    done = []
    try:
        for number in range(kills):
            going.until(lambda: len(ranks_of(going.process.pid)) == 3)
            moment = ("writing", "training", "starting")[number % 3]
            if moment == "starting":
                time.sleep(chance.uniform(0.0, 4.0))
            else:
                before = going.step
                going.until(lambda: going.step > before)  # noqa: B023
                if moment == "writing":
                    going.until(lambda: _writing(saved))
                    time.sleep(chance.uniform(0.0, 0.02))
                else:
                    time.sleep(chance.uniform(0.0, 0.1))
            rank = chance.randrange(3)
            victim = ranks_of(going.process.pid).get(rank)
            assert victim is not None, going.output.read_text()
            os.kill(victim, signal.SIGKILL)
            done.append((moment, rank, _writing(saved) if saved.is_dir() else False))
            going.until(lambda: ranks_of(going.process.pid).get(rank, victim) != victim)  # noqa: B023
        output = going.finish()
    finally:
        going.end()
    resumed = [int(step) for step in re.findall(r"goes on from .*/step-\d+, after (\d+) steps", output)]
    assert resumed == sorted(resumed)
    assert len(done) == kills
    said = re.findall(r"bapipe: rank (\d) on .*was killed by SIGKILL.*; restart (\d+) of (\d+), from ", output)
    assert said == [(str(rank), str(number), str(kills)) for number, (_, rank, _) in enumerate(done, 1)]
    assert kills < 3 or any(writing for moment, _, writing in done if moment == "writing")
    wanted, found = states(calm(steps)), states(saved)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert names(saved) == [f"step-{step:08d}" for step in (steps - 1, steps)]


def _profiled_plan() -> Plan:
    """Three stages of the layers that the example's profile is of, but narrower ones."""
    plan = tiny_plan(3)
    return replace(plan, prediction=replace(plan.prediction, time=0.05))


def test_an_elastic_run_goes_on_with_what_is_left(tmp_path: Path, calm: Callable[[int], Path]) -> None:
    """Three ranks, one is killed, two go on; the weights are those of three that were not killed."""
    plan = _profiled_plan()
    write_plan(plan, tmp_path / "plan.json")
    options = ["--steps", "8", "--every", "2"]
    saved = tmp_path / "saved"
    going = _Run(tmp_path / "plan.json", saved, *options, "--elastic", "--profile", str(PROFILE))
    try:
        going.until(lambda: going.step >= 2)
        going.kill(1)
        output = going.finish()
    finally:
        going.end()
    assert re.search(r"bapipe: rank 1 on .*, stage 1, .*: was killed by SIGKILL", output)
    after = read_plan(saved / "plan-2.json")
    assert after.ranks == ("localhost/0", "localhost/2")
    assert (after.global_batch, after.microbatch_size, after.optimizer) == (32, 8, "adam")
    assert describe_change(plan, after, "localhost/1 is lost") in output
    assert re.search(rf"training goes on from {saved}/step-0000000[246] by {saved}/plan-2.json", output)
    assert output.count("step 7  loss") == 1
    wanted, found = states(calm(SHORT) / "step-00000008"), states(saved)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("compiled", [True, False])
def test_a_plan_without_an_accelerator_runs_compiled_if_the_one_before_did(compiled: bool) -> None:
    plan, profile = replace(_profiled_plan(), compiled=compiled), read_profile(PROFILE)
    both = join_ways(profile, replace(profile, compiled=True))
    for known in (both, profile):  # of the second, the plan's stages were compiled though it was not measured so
        assert plan_without(plan, known, "localhost/0").compiled == compiled


def test_a_plan_without_an_accelerator() -> None:
    plan, profile = _profiled_plan(), read_profile(PROFILE)
    after = plan_without(plan, profile, "localhost/0")
    assert after.ranks == ("localhost/1", "localhost/2")
    assert after.model == plan.model
    alone = plan_without(after, profile, "localhost/2")
    assert alone.ranks == ("localhost/1",)
    with pytest.raises(BaPipeError, match="no accelerator is left"):
        plan_without(alone, profile, "localhost/1")
    text = describe_change(plan, after, "localhost/0 is lost")
    assert text.startswith(
        "localhost/0 is lost; planned again on 2 of 2 accelerators:\n  before  1f1b-so, layers 0–1 |"
    )
    assert f"{after.prediction.time / 0.05:.2f}x the time" in text


def test_of_a_broken_chain_the_longer_part_is_left() -> None:
    cluster = tiny_plan(3).cluster
    names = ("localhost/0 - localhost/1", "localhost/1 - localhost/2")
    linked = replace(cluster, pairs=dict.fromkeys(names, cluster.within))
    left = without_accelerator(linked, "localhost/0")
    assert list(left.pairs) == ["localhost/1 - localhost/2"]
    chain = replace(linked, topology="chain")
    assert len(without_accelerator(chain, "localhost/1")) == 1
    assert len(without_accelerator(chain, "localhost/2")) == 2


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    write_plan(tiny_plan(2), tmp_path / "plan.json")
    saving = ("--checkpoint", str(tmp_path / "saved"))
    done = run(tmp_path / "plan.json", *saving, "--elastic", "--profile", str(PROFILE))
    assert done.returncode == 2
    assert "bapipe: the profile has 8 layers of tiny in fp32, the plan 6 of tiny in fp32; " in done.stderr

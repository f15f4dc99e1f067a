"""What `bapipe run` is given gets to every rank."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paths import REPOSITORY

pytest.importorskip("torch", reason="a rank needs torch: pip install bapipe[torch]")

from bapipe.cli.launch import launch_command
from bapipe.cli.run import read_options, run_command
from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_options import Saving
from bapipe.torch.launch import worker
from bapipe.torch.launch.elastic import launch_elastic
from bapipe.torch.launch.launcher import worker_arguments
from bapipe.torch.launch.run_options import RunOptions, parse_options
from bapipe.torch.launch.worker import _arguments as rank_arguments

EXAMPLES = REPOSITORY / "examples"
EVERYTHING = RunOptions(
    steps=7,
    check=True,
    out=Path("a run.json"),
    seed=3,
    learning_rate=0.25,
    timeout=12.5,
    data="digits",
    engine="torch",
    transport="gloo",
    device="cpu",
    compiled=True,
    trace=False,
    vertical_sync=True,
    as_json=True,
    tensorboard=Path("board"),
    log=("csv:steps.csv", "wandb:mine"),
    saving=Saving(folder=Path("saved"), every=2, keep=4, asynchronous=True, resume=True),
)
"""every option, with a value that is not its default"""


def test_every_option_gets_to_a_rank() -> None:
    unset = asdict(RunOptions())
    assert not [name for name, value in asdict(EVERYTHING).items() if value == unset[name]]
    for options in (EVERYTHING, RunOptions()):
        module, name, *arguments = worker_arguments("plan.json", options)
        assert (module, name) == ("-m", "bapipe.torch.launch.worker")
        assert rank_arguments(arguments).options == options
    assert rank_arguments(["plan.json"]).options == RunOptions()


def test_every_field_is_an_option_of_the_command() -> None:
    """One field and one click option are all that a new option needs; their names and defaults agree."""
    made = run_command.make_context("run", ["plan.json"]).params
    own = {"plan_file", "restarts", "elastic", "speed", "profile"}
    assert read_options({name: value for name, value in made.items() if name not in own}) == RunOptions()
    saved = {**made, "folder": Path("saved")}
    options = read_options({name: value for name, value in saved.items() if name not in own})
    assert options == RunOptions(saving=Saving(folder=Path("saved")))


def test_a_printed_command_is_short_and_survives_the_shell() -> None:
    plan = str(EXAMPLES / "two-nodes" / "plan.json")
    words = ["--print", "--steps", "9", "--out", "it's a run.json", "--checkpoint", "saved", "--every", "3"]
    printed = CliRunner().invoke(launch_command, [plan, *words], catch_exceptions=False).output
    line = next(line for line in printed.splitlines() if "torchrun" in line)
    module, name, *arguments = shlex.split(line)[shlex.split(line).index("-m") :]
    assert (module, name) == ("-m", "bapipe.torch.launch.worker")
    wanted = RunOptions(steps=9, out=Path("it's a run.json"), saving=Saving(folder=Path("saved"), every=3))
    assert rank_arguments(arguments).options == wanted
    assert arguments[1] == '{"steps":9,"out":"it\'s a run.json","saving":{"folder":"saved","every":3}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--steps", "the options of a run are JSON, got '--steps'; give what bapipe launch --print writes"),
        ('{"stepps":1}', r"the options of the run: unknown key 'stepps' \(did you mean 'steps'\?\); remove or"),
        ('{"steps":"1"}', "the options of the run: steps: expected a whole number; got '1'"),
        ('{"steps":0}', "a run needs at least 1 step, got 0; raise --steps"),
        ('{"timeout":1e20}', r"the timeout can be 1e\+07 s at most, got 1e\+20; lower --timeout"),
        (
            '{"learning_rate":-1}',
            "the learning rate must be at least 0, got -1; change --learning-rate",
        ),
        ('{"seed":9000000000000000000}', "the seed must be within 62 bits, got 9000000000000000000; lower --seed"),
    ],
)
def test_other_options_of_a_rank_are_refused(text: str, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        parse_options(text)


@pytest.mark.parametrize("options", [{"timeout": math.inf}, {"learning_rate": math.nan}, {"steps": 10**30}])
def test_numbers_that_no_rank_could_be_told_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BaPipeError, match=r"; (lower|change) --"):
        RunOptions(**options)


def test_a_rank_refuses_other_options_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(["plan.json", "{"]) == 2
    assert capsys.readouterr().err.startswith("bapipe: the options of a run are JSON, got '{'; ")


def test_a_rank_that_torchrun_starts_again_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(EVERYTHING, saving=Saving(folder=Path("saved")))
    assert rank_arguments(["plan.json", options.to_json()]).options == options
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = rank_arguments(["plan.json", options.to_json()]).options
    assert again == replace(options, saving=Saving(folder=Path("saved"), resume=True))


def test_an_elastic_run_needs_checkpoints() -> None:
    with pytest.raises(BaPipeError, match=r"goes on from checkpoints, and none are saved; give --checkpoint$"):
        launch_elastic(EXAMPLES / "plan.json", RunOptions(), profile=EXAMPLES / "tiny-profile.json")

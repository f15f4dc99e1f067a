"""What `bapipe run` is told gets to every rank."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from paths import REPOSITORY

pytest.importorskip("torch", reason="a rank needs torch: pip install bapipe[torch]")

from bapipe.cli.launch import launch_command
from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_options import Saving
from bapipe.torch.launch.elastic import launch_elastic
from bapipe.torch.launch.launcher import worker_arguments
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.worker import _options as worker_options
from bapipe.torch.launch.worker import _saving as worker_saving

EXAMPLES = REPOSITORY / "examples"
EVERYTHING = RunOptions(
    steps=7,
    check=True,
    out=Path("run.json"),
    seed=3,
    learning_rate=0.25,
    timeout=12.5,
    data="digits",
    transport="gloo",
    device="cpu",
    vertical_sync=True,
    as_json=True,
    tensorboard=Path("board"),
    saving=Saving(folder=Path("saved"), every=2, keep=4, asynchronous=True, resume=True),
)
"""every option, with a value that is not its default"""


def read_by_a_rank(arguments: list[str]) -> RunOptions:
    """The options as a rank reads them; fails if the rank has no such option."""
    read = worker_options(arguments)
    renamed = {"as_json": read.json, "saving": worker_saving(read)}
    names = [field.name for field in fields(RunOptions) if field.name not in renamed]
    return RunOptions(**{name: getattr(read, name) for name in names}, **renamed)


def test_every_option_gets_to_a_rank() -> None:
    unset = asdict(RunOptions())
    assert not [name for name, value in asdict(EVERYTHING).items() if value == unset[name]]
    for options in (EVERYTHING, RunOptions()):
        module, name, *arguments = worker_arguments("plan.json", options)
        assert (module, name) == ("-m", "bapipe.torch.launch.worker")
        assert read_by_a_rank(arguments) == options


def test_a_rank_and_the_command_line_have_the_same_defaults() -> None:
    assert read_by_a_rank(["plan.json"]) == RunOptions()
    plan = str(EXAMPLES / "two-nodes" / "plan.json")
    printed = CliRunner().invoke(launch_command, [plan, "--print"], catch_exceptions=False).output
    line = next(line for line in printed.splitlines() if "torchrun" in line)
    assert line.endswith(" ".join(worker_arguments(plan, RunOptions())))


def test_an_elastic_run_needs_checkpoints() -> None:
    with pytest.raises(BaPipeError, match=r"goes on from checkpoints, and none are saved; give --checkpoint$"):
        launch_elastic(EXAMPLES / "plan.json", RunOptions(), profile=EXAMPLES / "tiny-profile.json")

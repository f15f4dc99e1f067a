"""What newcomers get wrong on the command line ends in one line that says what to do, and exit code 2."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from command import bapipe
from paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
PLAN, RUN, PROFILE = (str(EXAMPLES / name) for name in ("plan.json", "run.json", "tiny-profile.json"))
V100 = ("--cluster", "4xv100")

MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "a plan for a profile": (
        ("plan", PLAN, *V100),
        r"it is a plan, give a profile here \(bapipe profile -o writes",
    ),
    "a profile for a plan": (
        ("run", PROFILE),
        r"it is a profile, give a plan here \(bapipe plan --out writes one\)",
    ),
    "run and plan the wrong way round": (("compare", RUN, PLAN), "it is the record of a run, give a plan here"),
    "a run for a plan": (("report", RUN), "it is the record of a run, give a plan here"),
    "a plan to merge": (("merge", PLAN, "-o", "x.json"), "it is a plan, give a profile here"),
    "a misspelt schedule": (("plan", "vgg16", *V100, "--schedule", "1f1bso"), "did you mean '1f1b-so'"),
    "a misspelt model": (("plan", "vgg17", *V100), "did you mean 'vgg16'"),
    "a misspelt command": (
        ("paln", "vgg16"),
        r"No such command 'paln' \(did you mean 'plan'\?\); bapipe --help shows",
    ),
    "a misspelt option": (("plan", "vgg16", "--clutser", "4xv100"), "'--cluster'.*; bapipe plan --help shows"),
    "no cluster": (("plan", "vgg16"), "Missing option '--cluster'; bapipe plan --help shows what it takes"),
    "an unknown accelerator": (
        ("plan", "vgg16", "--cluster", "4xfoo"),
        r"unknown accelerator 'foo'; known are .*h100",
    ),
    "a missing cluster file": (
        ("plan", "vgg16", "--cluster", "c.toml"),
        "there is no file c.toml; check the path",
    ),
    "no stages": (("plan", "vgg16", *V100, "--stages", "0"), "--stages must be at least 1, got 0; raise it"),
    "a batch in words": (
        ("plan", "vgg16", *V100, "--global-batch", "ten"),
        "'ten' is not a valid integer; bapipe",
    ),
    "a rate in words": (("plan", "vgg16", *V100, "--link-bandwidth", "fast"), "must look like '12 GB/s'"),
    "code for costs": (("plan", "my_model:build", *V100), "run `bapipe profile my_model:build` first"),
    "a script for a model": (("plan", "./src/my_model.py", *V100), "name its function .* as src.my_model:build"),
    "a missing folder": (("plan", "vgg16", *V100, "--out", "no/plan.json"), "that does not exist; make it first"),
    "a missing folder of a page": (("report", PLAN, "-o", "no/r.html"), "that does not exist; make it first"),
    "a port beyond all": (("serve", "--port", "99999"), "99999 is not in the range .*; bapipe serve --help shows"),
    "no checkpoints": (
        ("checkpoint", "list", "."),
        "holds no checkpoint; give a folder that bapipe run --checkpoint",
    ),
    "too few times": (
        ("simulate", "gpipe", "-n", "4", "-m", "8", "--forward", "1,2", "--backward", "2"),
        "or 4, got 2",
    ),
    "an unknown target": (("export", PLAN, "--to", "megatrn"), "did you mean 'megatron'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, tmp_path: Path) -> None:
    arguments, said = MISTAKES[name]
    done = bapipe(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert re.search(said, line), line


def test_a_plan_that_cannot_be_written_is_refused_before_it_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr("bapipe.cli.plan.explore", searched)
    for option in ("--out", "--report"):
        done = bapipe("plan", "vgg16", *V100, option, "no/file", folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")


def test_a_port_that_is_taken_is_named() -> None:
    pytest.importorskip("uvicorn", reason="the page is served by uvicorn: pip install bapipe[serve]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bapipe("serve", "--port", str(port))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"{port}" in line
    assert "--port" in line

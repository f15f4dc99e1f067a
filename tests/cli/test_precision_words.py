"""The words of `--precision` in every command that takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.costs.profile import read_profile, write_profile
from bapipe.hardware.precision import WORDS
from bapipe.records.plan import read_plan
from command import bapipe, refused
from paths import REPOSITORY

COMMANDS = {
    "plan": ("plan", "alexnet", "--cluster", "2xa100", "--global-batch", "16"),
    "what-if": (
        "what-if",
        "alexnet",
        "--cluster",
        "2xa100",
        "--sweep",
        "link=1,2GB/s",
        "--global-batch",
        "16",
        "--micro-batch",
        "8",
        "--schedule",
        "1f1b-so",
    ),
    "profile": ("profile", "examples.tiny_model:build"),
    "auto": ("auto", "examples.tiny_model:build"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_computed_model_is_planned_in_any(word: str, tmp_path: Path) -> None:
    done = bapipe(*COMMANDS["plan"], "--precision", word, "--json", "--out", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["precision"] == word
    assert read_plan(tmp_path / "plan.json").dtype == word


def test_what_if_takes_one() -> None:
    times = [
        json.loads(bapipe(*COMMANDS["what-if"], "--precision", word, "--json").stdout)["points"][0]["answer"][
            "time"
        ]
        for word in ("fp32", "bf16-mixed")
    ]
    assert times[1] < times[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_nonsense_word_is_one_line(name: str, tmp_path: Path) -> None:
    line = refused(*COMMANDS[name], "--precision", "bf16mixed", folder=_code(tmp_path))
    assert "unknown precision 'bf16mixed' (did you mean 'bf16-mixed'?); use one of fp32, tf32" in line


@pytest.mark.parametrize("name", ["profile", "auto"])
def test_tf32_is_not_for_a_cpu(name: str, tmp_path: Path) -> None:
    device = ("--device", "cpu", *(("--ranks", "2") if name == "auto" else ()))
    line = refused_at_last(*COMMANDS[name], "--precision", "tf32", *device, folder=_code(tmp_path))
    assert "tf32 needs a GPU of compute capability 8.0 or more, and the device here is a CPU" in line


def refused_at_last(*arguments: str, folder: Path) -> str:
    """As `refused`; something may have been said before."""
    done = bapipe(*arguments, folder=folder)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def _code(folder: Path) -> Path:
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    return folder


def test_a_plan_follows_its_profile(tmp_path: Path) -> None:
    profile = read_profile(REPOSITORY / "examples" / "tiny-profile.json")
    write_profile(replace(profile, dtype="bf16-mixed"), tmp_path / "mixed.json")
    options = ("mixed.json", "--cluster", "2xcpu", "--global-batch", "32", "--out", "plan.json")
    assert bapipe("plan", *options, folder=tmp_path).returncode == 0
    assert read_plan(tmp_path / "plan.json").dtype == "bf16-mixed"
    assert bapipe("plan", *options, "--precision", "bf16-mixed", folder=tmp_path).returncode == 0
    line = refused("plan", *options, "--precision", "fp32", folder=tmp_path)
    assert "is of bf16-mixed, asked for fp32; profile the model with --precision fp32, or leave" in line


def test_files_from_before_load() -> None:
    """They have `dtype` and know nothing of casts."""
    text = (REPOSITORY / "examples" / "tiny-profile.json").read_text(encoding="utf-8")
    assert '"dtype": "fp32"' in text
    assert "weight_casts" not in text
    profile = read_profile(REPOSITORY / "examples" / "tiny-profile.json")
    assert not profile.at("cpu-core", 8).weight_casts.any()
    assert read_plan(REPOSITORY / "examples" / "plan.json").precision.word == "fp32"


def test_master_weights_and_options_of_the_optimizer(tmp_path: Path) -> None:
    options = (*COMMANDS["plan"], "--out", str(tmp_path / "plan.json"), "--optimizer", "adamw")
    more = ("--precision", "bf16", "--optimizer-arg", "fused=true", "--master-weights")
    assert bapipe(*options, *more).returncode == 0
    plan = read_plan(tmp_path / "plan.json")
    assert plan.optimizer == "adamw(fused=true,master_weights=true)"
    assert plan.stages[0].memory_parts is not None
    assert plan.stages[0].memory_parts.optimizer == pytest.approx(6 * plan.stages[0].weight_bytes)
    assert "keeps fp32 copies of weights of 16 bits, and those of fp32 are fp32" in refused(
        *options, "--master-weights"
    )
    assert "give --optimizer too" in refused(*COMMANDS["plan"], "--master-weights")

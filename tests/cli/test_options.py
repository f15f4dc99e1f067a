"""Options that were renamed: the old name works, and only the new one is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from bapipe.cli import COMMANDS, cli
from bapipe.cli.options import OLD_NAMES, RenamedOption
from bapipe.records.plan import read_plan
from command import bapipe, refused
from paths import REPOSITORY

TIMES = ("--forward", "1", "--backward", "2", "--json")
CASES = [
    (("plan", "alexnet", "--cluster", "2xv100", "--json"), ("--global-batch", "16")),
    (("plan", "alexnet", "--cluster", "2xv100", "--json"), ("--micro-batch", "8")),
    (("plan", "alexnet", "--cluster", "2xv100", "--global-batch", "32", "--json"), ("--in-flight", "2")),
    (("plan", "alexnet", "--cluster", "2xa100", "--global-batch", "16", "--json"), ("--precision", "bf16")),
    (("simulate", "1f1b-sno", "--stages", "2", *TIMES), ("--micro-batches", "3")),
    (("simulate", "1f1b", "--stages", "2", "-m", "3", *TIMES), ("--in-flight", "2,1")),
    (("simulate", "1f1b-so", "--stages", "2", "-m", "3", *TIMES), ("--optimizer-step", "5")),
]


@pytest.mark.parametrize(("command", "option"), CASES, ids=[" ".join(case[1]) for case in CASES])
def test_the_old_name_means_the_same(command: tuple[str, ...], option: tuple[str, str]) -> None:
    name, value = option
    new, old = bapipe(*command, name, value), bapipe(*command, OLD_NAMES[name], value)
    assert (new.returncode, new.stderr) == (0, "")
    assert new.stdout == old.stdout
    assert new.stdout != bapipe(*command).stdout
    json.loads(new.stdout)


def test_every_renamed_option_is_tried_here() -> None:
    assert {option[0] for _, option in CASES} == set(OLD_NAMES)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_and_messages_have_the_new_names_alone(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    text = bapipe(name, "--help").stdout
    for old in OLD_NAMES.values():
        assert f"{old} " not in text
        assert f"{old}\n" not in text
    old = set(OLD_NAMES.values())
    for option in command.params:
        assert not old & set(option.opts)
        assert isinstance(option, RenamedOption) == bool(set(OLD_NAMES) & set(option.opts))


def test_the_page_on_versions_lists_them() -> None:
    page = (REPOSITORY / "docs" / "versioning.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(--[a-z-]+)` \| `(--[a-z-]+)` \|$", page, re.MULTILINE)) == {
        old: new for new, old in OLD_NAMES.items()
    }


def test_a_value_that_is_no_number_names_the_new_option() -> None:
    assert "'--global-batch'" in refused("plan", "alexnet", "--cluster", "2xv100", "--minibatch", "many")


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        (("--compile", "vgg16"), True),  # what follows is the model
        (("vgg16", "--compile"), True),
        (("vgg16", "--compile", "yes"), True),
        (("vgg16", "--compile=yes"), True),
        (("vgg16", "--compile", "no"), False),
        (("--compile", "auto", "vgg16"), False),
        (("vgg16",), False),
    ],
)
def test_compile_may_stand_without_a_value(words: tuple[str, ...], compiled: bool, tmp_path: Path) -> None:
    done = bapipe("plan", *words, "--cluster", "2xv100", "--out", str(tmp_path / "plan.json"))
    assert (done.returncode, done.stderr) == (0, "")
    assert read_plan(tmp_path / "plan.json").compiled == compiled


@pytest.mark.parametrize("command", ["plan", "profile", "auto"])
def test_another_value_of_compile_is_refused(command: str) -> None:
    assert "'perhaps' is not one of 'auto', 'yes', 'no'" in refused(command, "vgg16", "--compile=perhaps")


@pytest.mark.parametrize("command", ["plan", "auto"])
def test_no_words_at_all_lack_the_model(command: str) -> None:
    assert "Missing argument 'MODEL'" in refused(command)


def test_what_stands_after_two_dashes_is_no_option() -> None:
    assert "--compile" in refused("plan", "--cluster", "2xv100", "--", "--compile")

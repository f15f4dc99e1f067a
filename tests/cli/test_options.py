"""Options that were renamed: the old name works, and only the new one is shown."""

from __future__ import annotations

import json
import re

import click
import pytest

from bapipe.cli import COMMANDS, cli
from bapipe.cli.options import OLD_NAMES, RenamedOption
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

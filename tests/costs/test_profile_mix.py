"""A mix of profiles with inputs of several lengths: mean times, most memory, and a plan of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bapipe.cli.profile import merge_command
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_mix import mixed_profile
from bapipe.errors import BaPipeError
from paths import REPOSITORY


@pytest.fixture
def short() -> Profile:
    return read_profile(REPOSITORY / "examples" / "tiny-profile.json")


def longer(profile: Profile, factor: float) -> Profile:
    """As if every input were so many times as long, under another argument of the model."""
    tables = {}
    for name, table in profile.accelerators.items():
        grown = {
            key: tuple(tuple(factor * value for value in row) for row in getattr(table, key))
            for key in ("forward", "backward", "boundary_forward", "boundary_backward", "saved_activations")
        }
        tables[name] = replace(table, **grown)
    return replace(profile, accelerators=tables, model=replace(profile.model, args={"length": 9}))


def test_times_and_messages_are_means_and_memory_is_the_most(short: Profile) -> None:
    mixed = mixed_profile([short, longer(short, 5)], [3, 1])
    (name,) = short.accelerators
    before, after = short.accelerators[name], mixed.accelerators[name]
    for key, factor in (("forward", 2), ("backward", 2), ("boundary_forward", 2), ("saved_activations", 5)):
        for one, two in zip(getattr(before, key), getattr(after, key), strict=True):
            assert two == pytest.approx([factor * value for value in one])
    assert mixed.model.args == {"length": 9}  # the longest is what all others fit in
    assert after.description.startswith("a mix: 0.75 of ")


def test_the_command_writes_a_profile_that_plans(short: Profile, tmp_path: Path) -> None:
    write_profile(short, tmp_path / "short.json")
    write_profile(longer(short, 5), tmp_path / "long.json")
    files = [str(tmp_path / "short.json"), str(tmp_path / "long.json")]
    done = CliRunner().invoke(merge_command, [*files, "--mix", "1,1", "-o", str(tmp_path / "mix.json")])
    assert done.exception is None, done.output
    again = read_profile(tmp_path / "mix.json")
    (name,) = again.accelerators
    assert again.accelerators[name].forward[0][0] == pytest.approx(3 * short.accelerators[name].forward[0][0])


def test_what_cannot_be_mixed_is_one_line(short: Profile) -> None:
    with pytest.raises(
        BaPipeError, match=r"^a mix has a share of at least 0 for each of its 2 profiles, got 1; give"
    ):
        mixed_profile([short, short], [1])
    (name,) = short.accelerators
    other = replace(short, accelerators={"elsewhere": short.accelerators[name]})
    with pytest.raises(BaPipeError, match=r"and for elsewhere; profile every size on the same"):
        mixed_profile([short, other], [1, 1])
    with pytest.raises(BaPipeError, match=r"merge profiles of one precision"):
        mixed_profile([short, replace(short, dtype="bf16")], [1, 1])

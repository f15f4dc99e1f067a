"""A profile with layers as captured and compiled: made of two, taken apart, written, merged and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.analysis.what_if import _faster
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.costs.profile_mix import mixed_profile
from bapipe.costs.profile_ways import each_way, has_both_ways, join_ways, of_way
from bapipe.errors import BaPipeError
from made_profiles import made_profile

CAPTURED = made_profile({"x": [3.0, 6.0]})
COMPILED = replace(made_profile({"x": [1.5, 3.0]}), compiled=True)


@pytest.fixture
def both() -> Profile:
    return join_ways(CAPTURED, COMPILED)


def test_it_is_made_of_two_and_taken_apart_again(both: Profile) -> None:
    assert has_both_ways(both)
    assert not both.compiled
    assert of_way(both, compiled=False) == CAPTURED
    assert of_way(both, compiled=True) == COMPILED
    for one in (CAPTURED, COMPILED):
        assert not has_both_ways(one)
        assert of_way(one, compiled=True) is of_way(one, compiled=False) is one
    assert len({both.hash, CAPTURED.hash, COMPILED.hash}) == 3


def test_a_file_has_compiled_costs_only_where_they_were_measured(both: Profile, tmp_path: Path) -> None:
    write_profile(both, tmp_path / "both.json")
    write_profile(CAPTURED, tmp_path / "captured.json")
    assert read_profile(tmp_path / "both.json") == both
    assert "compiled_accelerators" not in (tmp_path / "captured.json").read_text()
    assert read_profile(tmp_path / "captured.json") == CAPTURED


def test_only_one_of_each_of_the_same_layers_is_joined(both: Profile) -> None:
    for pair in ((COMPILED, CAPTURED), (CAPTURED, CAPTURED), (both, COMPILED)):
        with pytest.raises(BaPipeError, match="profile it with --compile auto"):
            join_ways(*pair)
    with pytest.raises(BaPipeError, match="have different layers; profile it with --compile auto"):
        join_ways(CAPTURED, replace(made_profile({"x": [1.0, 1.0, 1.0]}), compiled=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": {"forward": [[-1.0, 1.0]] * 3}},
            "accelerator 'x' compiled: forward is wrong: -1 for layer 'layer0'",
        ),
        ({"x": {"update": [-1.0, 0.0]}}, "accelerator 'x' compiled: update is wrong: -1"),
        ({"y": {}}, "compiled costs of types without costs as captured; profile the model again"),
    ],
)
def test_wrong_compiled_costs_are_refused(
    both: Profile, change: dict[str, dict[str, object]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    write_profile(both, path)
    values = json.loads(path.read_text())
    for name, fields in change.items():
        table = dict(values["compiled_accelerators"]["x"])
        values["compiled_accelerators"][name] = {**table, **fields}
    path.write_text(json.dumps(values))
    with pytest.raises(BaPipeError, match=message):
        read_profile(path)


def test_a_compiled_profile_has_no_other_compiled_costs(both: Profile) -> None:
    with pytest.raises(BaPipeError, match="profile the model again with --compile auto"):
        replace(both, compiled=True)


def test_each_way_is_merged_by_itself(both: Profile) -> None:
    others = [made_profile({"y": [9.0, 9.0]}), replace(made_profile({"y": [8.0, 8.0]}), compiled=True)]
    merged = merge_profiles([both, join_ways(others[0], others[1])])
    assert of_way(merged, compiled=False) == merge_profiles([CAPTURED, others[0]])
    assert of_way(merged, compiled=True) == merge_profiles([COMPILED, others[1]])
    partly = merge_profiles([both, others[0]])
    assert list(partly.accelerators) == ["x", "y"]
    assert list(partly.compiled_accelerators or ()) == ["x"]
    with pytest.raises(BaPipeError, match="was measured compiled, the other was not; profile both alike"):
        merge_profiles([both, others[1]])


def test_each_way_is_mixed_by_itself(both: Profile) -> None:
    found = mixed_profile([both, both], [3.0, 1.0])
    assert of_way(found, compiled=False) == mixed_profile([CAPTURED, CAPTURED], [3.0, 1.0])
    assert of_way(found, compiled=True) == mixed_profile([COMPILED, COMPILED], [3.0, 1.0])
    assert not has_both_ways(mixed_profile([both, CAPTURED], [1.0, 1.0]))


def test_a_change_is_made_of_each_way(both: Profile) -> None:
    quicker = each_way(both, _faster)
    for compiled in (False, True):
        before, after = (of_way(item, compiled=compiled).at("x", 1).forward for item in (both, quicker))
        assert (before / after == pytest.approx(2.0)) is True

"""Every cost field is treated by the rules of its row, and a new field needs no more than a row and its name."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from bapipe.costs import pipedream_graph, profile_merge, segments
from bapipe.costs import profile as profile_module
from bapipe.costs.fields import COST_FIELDS, CostArrays, CostField, CostTable, Floats, Like, Rows
from bapipe.costs.pipedream_graph import scaled_profile
from bapipe.costs.profile import LayerCosts, Profile, ProfiledLayer, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.costs.segments import Chain, make_chain
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef, Split

LAYERS = 3
NAMES = list(COST_FIELDS)
OPTIONAL = [name for name, rule in COST_FIELDS.items() if rule.unknown is not None]


def values(name: str, sizes: tuple[int, ...], *, factor: float = 1.0) -> Any:
    """Figures of a field that no other field, layer or size has."""
    base = factor * (1 + NAMES.index(name))
    row = tuple(base * (layer + 1) for layer in range(LAYERS))
    if COST_FIELDS[name].per == "layer":
        return row
    if COST_FIELDS[name].per == "size":
        return tuple(base * size**2 for size in sizes)
    return tuple(tuple(value * size**2 for value in row) for size in sizes)


def full(sizes: tuple[int, ...], *, factor: float = 1.0) -> CostTable:
    """A table that knows every field."""
    known = {name: values(name, sizes, factor=factor) for name in NAMES}
    return CostTable(source="measured", description="made", microbatches=sizes, **known)


def profiled(**tables: CostTable) -> Profile:
    layers = tuple(
        ProfiledLayer(name=f"layer{index}", parameters=250, weight_bytes=1000.0, split=Split(channels=4))
        for index in range(LAYERS)
    )
    return Profile(model=ModelRef(name="made"), dtype="fp32", layers=layers, accelerators=tables, input_bytes=7.0)


def without(table: CostTable, *names: str) -> CostTable:
    return replace(table, **dict.fromkeys(names))


def test_the_dataclasses_have_the_fields_of_the_table() -> None:
    assert {item.name for item in fields(CostArrays)} == COST_FIELDS.keys()
    assert issubclass(LayerCosts, CostArrays)
    assert issubclass(Chain, CostArrays)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_agrees_with_its_attribute(name: str) -> None:
    rule = COST_FIELDS[name]
    hint = Rows if rule.per == "size and layer" else tuple[float, ...]
    assert get_type_hints(CostTable)[name] == (hint if rule.unknown is None else hint | None)
    assert get_type_hints(CostArrays)[name] == (float if rule.per == "size" else Floats)
    (attribute,) = (item for item in fields(CostTable) if item.name == name)
    assert attribute.default is (MISSING if rule.unknown is None else None)
    if isinstance(rule.unknown, Like):
        assert NAMES.index(rule.unknown.field) < NAMES.index(name), "what stands in for it comes first"
    assert (rule.merging == "later") == (rule.per == "layer")
    assert rule.merging != "nearest" or rule.per == "size and layer"
    assert rule.merging != "stand-in" or isinstance(rule.unknown, Like)
    assert (rule.ratio is None) == (rule.unit == "bytes")


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused(name: str) -> None:
    table = full((1, 3))
    known = getattr(table, name)
    negative = tuple(np.negative(known).tolist())
    if COST_FIELDS[name].per == "size and layer":
        negative = tuple(map(tuple, negative))
        with pytest.raises(
            BaPipeError, match=rf"accelerator 'x': {name} is wrong: 2 values for 3 layers at micro-b"
        ):
            profiled(x=replace(table, **{name: (known[0], known[1][:2])}))
    with pytest.raises(
        BaPipeError, match=rf"accelerator 'x': {name} is wrong: \d (values|rows) for \d (layers|sizes)"
    ):
        profiled(x=replace(table, **{name: known[:-1]}))
    with pytest.raises(
        BaPipeError, match=rf"accelerator 'x': {name} is wrong: -[\d.]+ for (layer 'layer0'|micro-b)"
    ):
        profiled(x=replace(table, **{name: negative}))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_between_are_interpolated(name: str, size: int) -> None:
    known = values(name, (1, 3))
    if COST_FIELDS[name].per != "layer":
        known = (np.array(known[0]) * (3 - size) + np.array(known[1]) * (size - 1)) / 2
    assert getattr(profiled(x=full((1, 3))).at("x", size), name) == pytest.approx(known)


@pytest.mark.parametrize("name", OPTIONAL)
def test_the_unknown_is_filled_in(name: str) -> None:
    costs = profiled(x=without(full((1, 3)), name)).at("x", 2)
    unknown = COST_FIELDS[name].unknown
    if isinstance(unknown, Like):
        expected = getattr(costs, unknown.field) * unknown.share
    else:
        assert unknown in (0.0, math.inf)
        expected = unknown
    found = getattr(costs, name)
    assert np.shape(found) == (() if COST_FIELDS[name].per == "size" else (LAYERS,))
    assert found == pytest.approx(np.broadcast_to(expected, np.shape(found)))


@pytest.mark.parametrize(
    ("name", "known"),
    [(name, "both") for name in NAMES]
    + [(name, known) for name in OPTIONAL for known in ("first", "later", "neither")],
)
def test_tables_of_other_sizes_are_merged(name: str, known: str) -> None:
    rule = COST_FIELDS[name]
    one, two = full((1, 4)), full((2,), factor=10.0)
    one = one if known in ("both", "first") else without(one, name)
    two = two if known in ("both", "later") else without(two, name)
    found = getattr(merge_profiles([profiled(x=one), profiled(x=two)]).table("x"), name)
    first, later = values(name, (1, 4)), values(name, (2,), factor=10.0)
    if known == "neither":
        assert found is None
    elif rule.merging == "later":
        assert found == (first if known == "first" else later)
    elif known == "both":
        assert np.array(found) == pytest.approx(np.array([first[0], later[0], first[1]]))
    elif rule.merging == "both":
        assert found is None
    elif rule.merging == "nearest":
        row = np.array(first[0] if known == "first" else later[0])
        rows = [row, row * 2, np.array(first[1])] if known == "first" else [row / 2, row, row * 2]
        assert np.array(found) == pytest.approx(np.array(rows))
    else:
        assert isinstance(rule.unknown, Like)
        if known == "first":
            later = values(rule.unknown.field, (2,), factor=10.0)
        else:
            first = values(rule.unknown.field, (1, 4))
        assert found == (first[0], later[0], first[1])


@pytest.mark.parametrize("name", ["forward_workspace", "backward_workspace", "weight_workspace"])
def test_nothing_stands_in_that_a_table_does_not_know(name: str) -> None:
    unknown = COST_FIELDS[name].unknown
    assert isinstance(unknown, Like)
    one, two = full((1, 4)), without(full((2,)), unknown.field)
    assert getattr(merge_profiles([profiled(x=one), profiled(x=two)]).table("x"), name) is None


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_are_scaled(name: str) -> None:
    """Also what no published graph has, such as the costs of dividing a layer."""
    rule = COST_FIELDS[name]
    profile = profiled(x=full((2, 4)))
    found = getattr(scaled_profile(profile, [9]).table("x"), name)
    if rule.per == "layer":
        assert found == values(name, (4,))
    else:
        factor = 10 / 5 if rule.unit == "seconds" else 9 / 4
        assert np.array(found) == pytest.approx(np.array(values(name, (4,))) * factor)
    if rule.unknown is not None:
        unknown = profiled(x=without(full((2, 4)), name))
        assert getattr(scaled_profile(unknown, [9]).table("x"), name) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_takes_its_part_of_the_layer(name: str) -> None:
    """The first layer in two units of 2 channels, the others whole; 'y' costs three times what 'x' does."""
    rule = COST_FIELDS[name]
    profile = profiled(x=full((2,)), y=full((2,), factor=3.0))
    chain = make_chain(profile, ("x", "y"), 2, split={0: 2})
    found = getattr(chain, name)
    each = np.array([getattr(profile.at(kind, 2), name) for kind in ("x", "y")])
    costs = {"each": each, "most": each[1], "least": each[0]}[rule.types]
    if rule.per == "size":
        assert found == costs + chain.library.max()
        return
    halves = {"share": (0.5, 0.5), "whole": (1, 1), "up to": (0.5, 1), "first": (1, 0), "cut": (math.nan, 1)}
    expected = costs[..., [0, 0, 1, 2]] * np.array([*halves[rule.part], 1, 1])
    if rule.part == "cut":
        way = name.removeprefix("boundary_")
        passing = values(f"passing_{way}", (2,), factor=3.0)[0][0]
        expected[0] = (14.0 if way == "forward" else 0.0) + (costs[0] - passing) / 2
        expected[-1] = 0.0
    assert found == pytest.approx(expected)


def test_the_workspace_must_have_a_value_per_size(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profiled(x=full((1, 3))), path)
    assert read_profile(path) == profiled(x=full((1, 3)))
    path.write_text(path.read_text().replace('"workspace": [', '"workspace": [ 1,'))
    with pytest.raises(BaPipeError, match=r"workspace is wrong: 3 values for 2 sizes; correct the profile"):
        read_profile(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderTable(CostTable):
    """With a field more."""

    scratch: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WiderCosts(LayerCosts):
    """With a field more."""

    scratch: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WiderChain(Chain):
    """With a field more."""

    scratch: Floats


def wider(sizes: tuple[int, ...], scratch: Rows | None) -> WiderTable:
    known = full(sizes)
    return WiderTable(scratch=scratch, **{item.name: getattr(known, item.name) for item in fields(known)})


def test_a_new_field_is_a_row_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = CostField("bytes", "most", "share", Like("saved_activations", 1 / 4), "nearest")
    for module in (profile_module, profile_merge, pipedream_graph, segments):
        monkeypatch.setattr(module, "COST_FIELDS", {**COST_FIELDS, "scratch": rule})
    monkeypatch.setattr(profile_module, "LayerCosts", WiderCosts)
    monkeypatch.setattr(segments, "Chain", WiderChain)
    profile = profiled(x=wider((1, 3), ((1.0, 2.0, 3.0), (9.0, 8.0, 7.0))))
    unknown = profiled(x=wider((2, 4), None))
    assert profile.at("x", 2).scratch.tolist() == [5.0, 5.0, 5.0]  # type: ignore[attr-defined]
    costs = unknown.at("x", 2)
    assert costs.scratch.tolist() == (costs.saved_activations / 4).tolist()  # type: ignore[attr-defined]
    merged = merge_profiles([profile, unknown]).table("x")
    assert [row[0] for row in merged.scratch] == [1.0, 2.0, 9.0, 12.0]  # type: ignore[attr-defined]
    scaled = scaled_profile(profile, [6]).table("x")
    assert scaled.scratch == ((18.0, 16.0, 14.0),)  # type: ignore[attr-defined]
    chain = make_chain(profile, ("x",), 3, split={0: 2})
    assert chain.scratch.tolist() == [4.5, 4.5, 8.0, 7.0]  # type: ignore[attr-defined]
    with pytest.raises(BaPipeError, match="scratch is wrong: 1 rows for 2 sizes"):
        profiled(x=wider((1, 3), ((1.0, 2.0, 3.0),)))

"""Plain values -> dataclasses: what is not exactly right is refused with its place and the nearest right name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from bapipe.errors import FileFormatError
from bapipe.io.decode import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    size: float
    spokes: int = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Bicycle:
    name: str
    wheels: tuple[Wheel, ...]
    kind: Literal["road", "cargo"] = "road"
    gears: int | None = None
    price: float | str = 0.0
    bell: bool = False
    notes: dict[str, int] = field(default_factory=dict)
    teeth: tuple[tuple[int, ...], ...] = ()


def bicycle(**changes: object) -> Bicycle:
    return decode(Bicycle, {"name": "red", "wheels": [{"size": 28}], **changes}, where="bike.json")


def test_defaults_and_conversions() -> None:
    assert bicycle() == Bicycle(name="red", wheels=(Wheel(size=28.0),))
    assert isinstance(bicycle().wheels[0].size, float)


def test_every_kind_of_value() -> None:
    made = bicycle(kind="cargo", gears=3, price="free", bell=True, notes={"a": 1}, teeth=[[11, 13], []])
    assert made == Bicycle(
        name="red",
        wheels=(Wheel(size=28.0),),
        kind="cargo",
        gears=3,
        price="free",
        bell=True,
        notes={"a": 1},
        teeth=((11, 13), ()),
    )
    assert bicycle(gears=None).gears is None
    assert bicycle(price=3).price == 3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nmae": 1}, r"bike.json: unknown key 'nmae' \(did you mean 'name'\?\); remove or rename it"),
        ({"zzz": 1}, r"bike.json: unknown key 'zzz'; remove or rename it"),
        ({"name": 3}, "bike.json: name: expected a text; got 3"),
        ({"name": None}, "bike.json: name: expected a text; got None"),
        ({"wheels": {}}, "bike.json: wheels: expected a list; got {}"),
        ({"wheels": [{}]}, r"bike.json: wheels\[0\]: 'size' is missing; add it"),
        ({"wheels": [3]}, r"bike.json: wheels\[0\]: expected a table of size, spokes; got 3"),
        ({"wheels": [{"size": "28"}]}, r"bike.json: wheels\[0\]: size: expected a number; got '28'"),
        ({"wheels": [{"size": math.nan}]}, r"wheels\[0\]: size: expected a finite number; got nan"),
        ({"wheels": [{"size": -math.inf}]}, "expected a finite number"),
        ({"wheels": [{"size": True}]}, "size: expected a number; got True"),
        ({"wheels": [{"size": 1, "spokes": 1.0}]}, "spokes: expected a whole number; got 1.0"),
        ({"wheels": [{"size": 1, "spokes": False}]}, "spokes: expected a whole number; got False"),
        ({"kind": "raod"}, r"kind: must be one of road, cargo; got 'raod' \(did you mean 'road'\?\)"),
        ({"kind": ["road"]}, "kind: must be one of"),
        ({"gears": "three"}, "gears: expected a whole number; got 'three'"),
        ({"price": [1]}, r"price: expected a number or a text; got \[1\]"),
        ({"bell": 1}, "bell: expected true or false; got 1"),
        ({"notes": []}, "notes: expected a table; got"),
        ({"notes": {"a": "b"}}, "notes: a: expected a whole number; got 'b'"),
        ({"teeth": [[1], [None]]}, r"teeth\[1\]\[0\]: expected a whole number; got None"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        bicycle(**changes)


@pytest.mark.parametrize("data", [None, [], 3, "text"])
def test_not_a_table(data: Any) -> None:
    with pytest.raises(FileFormatError, match="expected a table of name, wheels"):
        decode(Bicycle, data, where="bike.json")


def test_long_values_are_shortened() -> None:
    with pytest.raises(FileFormatError) as caught:
        bicycle(name=["x" * 10_000])
    assert len(str(caught.value)) < 120


def test_integers_beyond_floats_are_no_traceback() -> None:
    with pytest.raises(FileFormatError, match="expected a finite number"):
        bicycle(wheels=[{"size": 10**400}])

"""Mutations of documents by their structure, and of their bytes; the same generator gives the same document."""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["Raw", "json_text", "mutated_bytes", "mutated_values", "places", "toml_text"]

Path = tuple[Any, ...]
"""keys and positions from the top of a document"""


class Raw(str):
    """A token that is written as it is: NaN, a number of thousands of digits, a table with one key twice."""


NUMBERS = (
    -1, 0, 1, 2, 3, 7, 99, 1000, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.0, -1.0,
    1e-9, 1e-300, 5e-324, 1e15, 1e18, 1e30, 1e100, 1e300, 1e308, -1e308, Raw("NaN"), Raw("Infinity"),
    Raw("-Infinity"), Raw("1e999"), Raw("9" * 400), Raw("9" * 5000), Raw("nan"), Raw("inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "x", "0", "-1", "None", "nan", "1e308", "[/bold]", "[bold red]", ":smile:", "%s %d {0} {x}", "a\nb",
    "\t", "\x00", "\x1b[31m", "\u202e\u2028", "\ud800", "é́", "漢字" * 40,
    "🚀", "../../etc/passwd", "/", "a/b", "<script>",
    "'; rm -rf /", "$(id)", "0F0", "1B0", "9F9", "0A", "99999F9", "0F999999999", "0W0", "x" * 300, "y" * 100_000,
    "adamw", "sgd(", "adamw(fused=true)", "torch.optim:Nothing", "fp8", "bf16-mixed", "fp16", "node0/0",
    "node0/1 - node0/0", "gpipe", "1f1b-so", "zb-h1", "pipedream", "cut-through", "static", "slots",
    "gpu", "fpga", "chain", "half", "v100", "16 GB", "1e400 GB", "0 GB/s", "12 GB/s", "-5 us", "200%",
    "bapipe.plan/1", "bapipe.plan/2", "vgg16", "os:system",
)  # fmt: skip
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0],
    [1, 2, 3],
    ["x"],
    {"a": {"b": [1]}},
    0,
    1,
    "x",
    1.5,
)


def mutated_values(values: Any, random_: random.Random, donor: Any) -> Any:
    """A copy with one to four mutations; `donor` is another valid document of the format, to splice from."""
    changed = copy.deepcopy(values)
    for _ in range(random_.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))):
        kind = random_.choices(_KINDS, _WEIGHTS)[0]
        changed = kind(changed, random_, donor)
    return changed


def places(values: Any) -> dict[Path, list[Path]]:
    """Every place of a document below its top, by its place with positions left out."""
    found: dict[Path, list[Path]] = defaultdict(list)

    def walk(value: Any, path: Path, shape: Path) -> None:
        if path:
            found[shape].append(path)
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for key, item in items:
            walk(item, (*path, key), (*shape, "*" if isinstance(value, list) else key))

    walk(values, (), ())
    return found


def at(values: Any, path: Path) -> Any:
    for key in path:
        values = values[key]
    return values


def _pick(values: Any, random_: random.Random, wanted: Callable[[Any], bool] = lambda _: True) -> Path | None:
    """A place whose value is wanted: each kind of place is as likely, however often it occurs."""
    groups = [
        [path for path in paths if wanted(at(values, path))]
        for _, paths in sorted(places(values).items(), key=repr)
    ]
    groups = [group for group in groups if group]
    return random_.choice(random_.choice(groups)) if groups else None


def _put(values: Any, path: Path, value: Any) -> Any:
    at(values, path[:-1])[path[-1]] = value
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _delete(values: Any, random_: random.Random, _: Any) -> Any:
    path = _pick(values, random_)
    if path is not None:
        del at(values, path[:-1])[path[-1]]
    return values


def _retype(values: Any, random_: random.Random, _: Any) -> Any:
    path = _pick(values, random_)
    return values if path is None else _put(values, path, copy.deepcopy(random_.choice(OTHERS)))


def _number(values: Any, random_: random.Random, _: Any) -> Any:
    path = _pick(values, random_, _is_number)
    return values if path is None else _put(values, path, random_.choice(NUMBERS))


def _nudge(values: Any, random_: random.Random, _: Any) -> Any:
    """A number that still looks right, so that what follows from it no longer fits."""
    path = _pick(values, random_, _is_number)
    if path is None:
        return values
    old = at(values, path)
    near: list[Any] = [old + 1, old - 1, old * 2, -old, 0]
    if isinstance(old, float):
        near += [old * 10 ** random_.randint(-12, 12), old * (1 + random_.gauss(0, 0.5))]
    else:
        near += [old // 2, old + random_.randint(-5, 5)]
    return _put(values, path, random_.choice(near))


def _text(values: Any, random_: random.Random, _: Any) -> Any:
    path = _pick(values, random_, lambda value: isinstance(value, str))
    if path is None:
        return values
    old, new = at(values, path), random_.choice(TEXTS)
    if old and random_.random() < 0.3:
        spot = random_.randrange(len(old))
        new = random_.choice(
            (old[:spot] + new[:200] + old[spot:], old[:spot] + old[spot + 1 :], old.upper(), old * 2)
        )
    return _put(values, path, new)


def _list(values: Any, random_: random.Random, _: Any) -> Any:
    """One entry twice, none, in another order, or very many."""
    path = _pick(values, random_, lambda value: isinstance(value, list) and len(value) > 0)
    if path is None:
        return values
    old = list(at(values, path))
    entry = random_.choice(old)
    what = random_.randrange(6)
    if what == 0:
        old.insert(random_.randrange(len(old) + 1), copy.deepcopy(entry))
    elif what == 1:
        old = []
    elif what == 2:
        random_.shuffle(old)
    elif what == 3:
        old = [copy.deepcopy(entry) for _ in range(random_.choice((10, 100, 2000)))]
    elif what == 4:
        old = old[: random_.randrange(len(old))]
    else:
        old.reverse()
    return _put(values, path, old)


def _swap(values: Any, random_: random.Random, _: Any) -> Any:
    """Two values of one kind of place change places, or one takes the other's."""
    groups = [paths for _, paths in sorted(places(values).items(), key=repr) if len(paths) > 1]
    if not groups:
        return values
    one, other = random_.sample(random_.choice(groups), 2)
    first, second = copy.deepcopy(at(values, one)), copy.deepcopy(at(values, other))
    values = _put(values, one, second)
    return _put(values, other, first) if random_.random() < 0.5 else values


def _refer(values: Any, random_: random.Random, _: Any) -> Any:
    """A text or number from anywhere in the document in place of another."""
    kind = random_.choice((str, float, int))
    pick = lambda value: isinstance(value, kind) and not isinstance(value, bool)  # noqa: E731
    one, other = _pick(values, random_, pick), _pick(values, random_, pick)
    return values if one is None or other is None else _put(values, one, copy.deepcopy(at(values, other)))


def _splice(values: Any, random_: random.Random, donor: Any) -> Any:
    """A part of another valid document in the same place."""
    theirs, ours = places(donor), places(values)
    both = sorted((shape for shape in ours if shape in theirs), key=repr)
    if not both:
        return values
    shape = random_.choice(both)
    return _put(values, random_.choice(ours[shape]), copy.deepcopy(at(donor, random_.choice(theirs[shape]))))


def _key(values: Any, random_: random.Random, _: Any) -> Any:
    """A key renamed, added, or there twice."""
    path = _pick(values, random_, lambda value: isinstance(value, dict) and len(value) > 0)
    table = values if path is None or random_.random() < 0.3 else at(values, path)
    if not isinstance(table, dict) or not table:
        return values
    key = random_.choice(list(table))
    what = random_.randrange(4)
    if what == 0:
        table[random_.choice(("minibatch", "stash", "rivals", "features", key + "s", key[:-1], *TEXTS))] = (
            table.pop(key)
        )
    elif what == 1:
        table[random_.choice(("minibatch", "stash", "x", "schema", *TEXTS))] = copy.deepcopy(
            random_.choice(OTHERS)
        )
    elif what == 2:
        table[key] = Raw(
            f"{json_text(table[key])}, {json.dumps(key)}: {json_text(random_.choice((table[key], 1, None)))}"
        )
    else:
        table[random_.choice(TEXTS)] = copy.deepcopy(table[key])
    return values


def _nest(values: Any, random_: random.Random, _: Any) -> Any:
    path = _pick(values, random_)
    depth = random_.choice((2, 50, 2000, 100_000))
    text = "[" * depth + "]" * depth if random_.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth
    return values if path is None else _put(values, path, Raw(text))


_CHOICES: dict[Callable[[Any, random.Random, Any], Any], int] = {
    _delete: 10, _retype: 12, _number: 18, _nudge: 20, _text: 12, _list: 10, _swap: 10, _refer: 6, _splice: 10,
    _key: 6, _nest: 1,
}  # fmt: skip
_KINDS, _WEIGHTS = list(_CHOICES), list(_CHOICES.values())


def mutated_bytes(data: bytes, random_: random.Random) -> bytes:
    """Cut off, with bytes changed, put in, taken out or repeated."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 5))):
        spot = random_.randrange(len(changed) + 1)
        what = random_.randrange(6)
        if what == 0:
            del changed[spot:]
        elif what == 1 and spot < len(changed):
            changed[spot] = random_.randrange(256)
        elif what == 2:
            changed[spot:spot] = random_.choice(
                (
                    b"\xff",
                    b"\x00",
                    b"\xef\xbb\xbf",
                    b'"',
                    b"{",
                    b"]",
                    b"\n",
                    b"=",
                    b"[[",
                    b"9" * 30,
                    b"\xed\xa0\x80",
                    b",",
                )
            )
        elif what == 3:
            del changed[spot : spot + random_.randint(1, 30)]
        elif what == 4:
            end = spot + random_.randint(1, 200)
            changed[spot:spot] = changed[spot:end]
        elif what == 5 and len(changed) > 1:
            other = random_.randrange(len(changed))
            spot = min(spot, len(changed) - 1)
            changed[spot], changed[other] = changed[other], changed[spot]
    return bytes(changed)


def json_text(value: Any) -> str:
    """JSON, with raw tokens as they are; lone surrogates are escaped, as JSON may have them."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {json_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(json_text, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return json.dumps(value)


def toml_text(value: Any) -> str:
    """TOML, tables below the top inline."""
    if not isinstance(value, dict):
        return _toml(value)
    return "".join(f"{json.dumps(str(key))} = {_toml(item)}\n" for key, item in value.items())


def _toml(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '""'
    return json.dumps(value, ensure_ascii=isinstance(value, str) and "\ud800" in value)

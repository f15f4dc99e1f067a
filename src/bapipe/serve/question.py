"""Question: all that a page of `bapipe serve` asks, as its URL holds it and as options of `bapipe plan`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from bapipe.costs.optimizers import find_optimizer
from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.precision import find_precision
from bapipe.io.files import content_hash
from bapipe.planner import Request
from bapipe.units import parse_bandwidth, parse_bytes

__all__ = [
    "LARGEST_GLOBAL_BATCH",
    "LONGEST_TEXT",
    "MOST_ACCELERATORS",
    "MOST_MICROBATCHES",
    "Question",
    "command_line",
    "parse_question",
    "query_values",
]

MOST_ACCELERATORS = 512
MOST_MICROBATCHES = 4096
LARGEST_GLOBAL_BATCH = 65_536
LONGEST_TEXT = 200
"""limits so that one question cannot occupy the machine; `bapipe plan` has none of them"""
_COUNTS = {
    "global_batch": LARGEST_GLOBAL_BATCH,
    "microbatch": LARGEST_GLOBAL_BATCH,
    "cap": LARGEST_GLOBAL_BATCH,
    "stages": MOST_ACCELERATORS,
}
_OLD_KNOBS = {"dtype": "precision", "minibatch": "global_batch"}
"""what a knob was called before -> its name; links that were shared keep working"""
_TRUE, _FALSE = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan; None leaves it to the planner, as a left-out option of `bapipe plan` does."""

    model: str
    """a built-in name, or a file of the served folder"""
    cluster: str
    """a shorthand such as 4xv100, or a file of the served folder"""
    global_batch: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    cap: int | None = None
    """K, the in-flight micro-batches at the first stage of a 1f1b schedule"""
    stages: int | None = None
    strategy: str = "exact"
    space: str = "full"
    optimizer: str = "sgd"
    precision: str | None = None
    memory_limit: str | None = None
    """as it was written, such as 12GB"""
    link_bandwidth: str | None = None
    """as it was written, such as 1.6GB/s"""
    split_layers: bool = False

    @property
    def hash(self) -> str:
        return content_hash(self)

    @property
    def request(self) -> Request:
        """What is asked of the planner; raises BaPipeError where it is none that could be asked."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(Request) if hasattr(self, field.name)
        }
        return Request(**values)


def parse_question(values: Mapping[str, object]) -> Question:
    """The question in a URL's query or a JSON object: texts, whole numbers and true or false by their names.

    Empty texts are left out. Raises BaPipeError for what is unknown, of the wrong kind, over a limit, or cannot be
    asked of the planner.
    """
    known = [field.name for field in fields(Question)]
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = _OLD_KNOBS.get(str(given), given)
        if name not in known:
            raise BaPipeError(
                f"unknown knob '{_shown(str(name))}'{nearest(str(name), known)}; known: {', '.join(known)}"
            )
        if name in _COUNTS:
            read: Any = _count(name, value)
        elif name == "split_layers":
            read = _switch(name, value)
        else:
            read = _text(name, value)
        if read is not None:
            found[name] = read
    for name in ("model", "cluster"):
        if name not in found:
            raise BaPipeError(f"a question needs a {name}; give {name}=…")
    question = Question(**found)
    _check(question)
    return question


def _text(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BaPipeError(f"{name} must be a text, got {str(value)[:60]}")
    if len(value) > LONGEST_TEXT or not value.isprintable():
        raise BaPipeError(f"{name} must be at most {LONGEST_TEXT} printable characters, got '{_shown(value)}'")
    return value.strip() or None


def _shown(value: str) -> str:
    return "".join(character if character.isprintable() else " " for character in value[:60])


def _count(name: str, value: object) -> int | None:
    if value is None or value == "":
        return None
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BaPipeError(f"{name} must be a whole number, got '{_shown(str(value)[:60])}'")
    if not 1 <= value <= _COUNTS[name]:
        got = value if abs(value) < 10**12 else "a number of many digits"
        raise BaPipeError(f"{name} must be from 1 to {_COUNTS[name]}, got {got}; correct it")
    return value


def _switch(name: str, value: object) -> bool | None:
    text = str(value).lower() if isinstance(value, (bool, int, str)) else None
    if value is None or text in _FALSE:
        return None
    if text in _TRUE:
        return True
    raise BaPipeError(f"{name} must be true or false, got '{_shown(str(value)[:60])}'")


def _check(question: Question) -> None:
    _ = question.request
    find_optimizer(question.optimizer)
    if question.space not in ("full", "paper"):
        raise BaPipeError(f"unknown space '{question.space[:40]}'; known: full, paper")
    if question.precision is not None:
        find_precision(question.precision)
    for name, parse in (("memory_limit", parse_bytes), ("link_bandwidth", parse_bandwidth)):
        text = cast(str | None, getattr(question, name))
        if text is not None and not 0 < parse(text, what=name) < 1e18:
            raise BaPipeError(f"{name} must be more than 0 and under 10¹⁸ bytes, got '{text}'")
    if question.global_batch and question.microbatch:
        count = question.global_batch // question.microbatch
        if count > MOST_MICROBATCHES:
            raise BaPipeError(
                f"a page plans at most {MOST_MICROBATCHES} micro-batches, got {count}; raise the micro-batch "
                "size, or use `bapipe plan`"
            )


def query_values(question: Question) -> dict[str, str]:
    """What `parse_question` reads back, without what has its default."""
    values = {}
    for field in fields(Question):
        value = getattr(question, field.name)
        if value != field.default:
            values[field.name] = "1" if value is True else str(value)
    return values


def command_line(question: Question) -> str:
    """The command that makes the same plan.json, to be run in the served folder."""
    options = {
        "--cluster": question.cluster,
        "--global-batch": question.global_batch,
        "--micro-batch": question.microbatch,
        "--schedule": question.schedule,
        "--in-flight": question.cap,
        "--stages": question.stages,
        "--strategy": None if question.strategy == "exact" else question.strategy,
        "--space": None if question.space == "full" else question.space,
        "--optimizer": question.optimizer,
        "--precision": question.precision,
        "--memory-limit": question.memory_limit,
        "--link-bandwidth": question.link_bandwidth,
    }
    words = ["bapipe", "plan", question.model]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    return shlex.join([*words, *(["--split-layers"] if question.split_layers else []), "--out", "plan.json"])

"""Megatron's layout string, in and out: which layers each (virtual) stage has.

    Et*3|(tt|)*29m|L     E embedding, t block, m multi-token prediction, L loss; | ends a stage

Commas and spaces only separate. `(…)*n` and `x*n` repeat. With several stages per rank the rows go on from rank to
rank: row i is on rank i mod PP.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from bapipe.errors import BaPipeError
from bapipe.exporters.module_stages import BlockStage

__all__ = ["layout_text", "looks_like_layout", "parse_layout"]

_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_REPEAT = re.compile(r"([EtmL|])\*(\d{1,4})")
_MOST = 100_000
"""characters of an expanded layout"""


def layout_text(stages: Sequence[BlockStage]) -> str:
    """The layout of those stages; equal rows in a row are written once."""
    rows = ["E" * stage.embedding + _blocks(stage.blocks) + "L" * stage.head for stage in stages]
    runs = [(row, len(list(same))) for row, same in itertools.groupby(rows)]
    parts: list[str] = []
    for index, (row, count) in enumerate(runs):
        last = index == len(runs) - 1
        if count > 2:
            parts.append(f"({row}|)*{count - last}" + (row if last else ""))
        else:
            parts.append("|".join([row] * count) + ("" if last else "|"))
    return "".join(parts)


def _blocks(count: int) -> str:
    return "t" * count if count < 3 else f"t*{count}"


def looks_like_layout(text: str) -> bool:
    """Whether a text can only be a layout: no file is named so."""
    return "|" in text and re.fullmatch(r"[EtmL|()*,\d\s]+", text.strip()) is not None


def parse_layout(text: str) -> tuple[BlockStage, ...]:
    """The stages of a layout; refuses what Megatron refuses, and multi-token prediction, which BaPipe has not."""
    rows = _expand(text).split("|")
    for index, row in enumerate(rows):
        wrong = next((letter for letter in row if letter not in "EtL"), None)
        if wrong is not None:
            known = "multi-token prediction, which is not known here" if wrong == "m" else "no layer of a layout"
            raise BaPipeError(f"row {index} of the layout has '{wrong}', {known}; use E, t, L, |, * and ()")
    flat = "".join(rows)
    if not re.fullmatch(r"Et+L", flat):
        raise BaPipeError(
            f"a layout has one E first, one L last and blocks (t) between, got '{flat[:40]}' in all; correct it"
        )
    return tuple(BlockStage(embedding="E" in row, blocks=row.count("t"), head="L" in row) for row in rows)


def _expand(text: str) -> str:
    text = re.sub(r"[,\s]", "", text)
    for pattern in (_GROUP, _REPEAT):
        while match := pattern.search(text):
            text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
            if len(text) > _MOST:
                raise BaPipeError(f"the layout has more than {_MOST} layers; lower its numbers")
    left = re.search(r"[^EtmL|]", text)
    if left is not None:
        raise BaPipeError(
            f"'{text[left.start() :][:20]}' is no part of a layout such as Et*3|(tt|)*6tL; correct it"
        )
    return text

"""Splits made by hand, as people write them elsewhere: Megatron's layout, counts per stage, torch's CSV."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError
from bapipe.exporters.megatron_layout import looks_like_layout, parse_layout
from bapipe.exporters.module_stages import block_of_layer
from bapipe.io.files import read_text
from bapipe.schedule.actions import Schedule
from bapipe.schedule.schedule_file import read_schedule

__all__ = ["HandSplit", "read_split"]

_COUNTS = re.compile(r"\s*\d{1,6}(\s*,\s*\d{1,6})+\s*")
_ARGUMENT = re.compile(r"--pipeline-model-parallel-layout[ =]+(.+)")
_SIZE = re.compile(r"--pipeline-model-parallel-size[ =]+(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandSplit:
    """Where the layers are cut, and in which order the stages run if that was given."""

    name: str
    firsts: tuple[int, ...]
    """the first layer of each stage but the first"""
    ranks: int | None = None
    """ranks of a pipeline; None: not said"""
    order: Schedule | None = None

    @property
    def stages(self) -> int:
        return len(self.firsts) + 1


def read_split(text: str, layers: Sequence[str], *, cuts: str | None = None) -> HandSplit:
    """What the text means for a model of these layers.

    - `Et*3|(tt|)*6tL`, or a file with it or with Megatron's arguments: blocks per (virtual) stage;
    - `4,4,4`: blocks per stage, as Colossal-AI and FlagScale have it, or layers where these add up to all;
    - `orders.csv` (torch's) or a schedule file: the order, with the counts in `cuts`;
    - `plan.json`: that plan's cuts and order.
    """
    if looks_like_layout(text):
        return _of_layout(text, layers)
    if _COUNTS.fullmatch(text):
        return HandSplit(name=text.strip(), firsts=_of_counts(text, layers))
    if text.lower().endswith((".csv", ".json")):
        return _of_file(text, layers, cuts)
    content = read_text(text)
    argument = _ARGUMENT.search(content)
    layout = argument[1].strip().strip("'\"") if argument else _without_comments(content)
    found = _of_layout(layout, layers)
    size = _SIZE.search(content)
    return HandSplit(name=text, firsts=found.firsts, ranks=int(size[1]) if size else None)


def _without_comments(content: str) -> str:
    return "".join(line for line in content.splitlines() if not line.lstrip().startswith("#"))


def _of_file(path: str, layers: Sequence[str], cuts: str | None) -> HandSplit:
    if path.lower().endswith(".json") and '"bapipe.plan/' in read_text(path)[:200]:
        from bapipe.records.plan import read_plan

        plan = read_plan(path)
        names = tuple(dict.fromkeys(name for stage in plan.stages for name in stage.layers))
        if names != tuple(layers):
            raise BaPipeError(
                f"{path} is a plan of {plan.model.name} with other layers; give the profile of that model"
            )
        firsts = tuple(stage.first_layer for stage in plan.stages[1:])
        if (
            any(stage.fractions for stage in plan.stages)
            or max(len(stage.accelerators) for stage in plan.stages) > 1
        ):
            raise BaPipeError(
                f"{path} has split layers or replicas, which a split by hand has not; see its prediction"
            )
        return HandSplit(name=path, firsts=firsts)
    order = read_schedule(path)
    if cuts is None:
        raise BaPipeError(
            f"{path} has the order of {order.num_stages} stages but not where they are cut; give --cuts with the "
            "blocks or layers of each, such as 4,4,4"
        )
    firsts = _of_layout(cuts, layers).firsts if looks_like_layout(cuts) else _of_counts(cuts, layers)
    if len(firsts) + 1 != order.num_stages:
        raise BaPipeError(f"{path} has {order.num_stages} stages, --cuts {len(firsts) + 1}; make them alike")
    return HandSplit(name=path, firsts=firsts, order=order)


def _of_layout(text: str, layers: Sequence[str]) -> HandSplit:
    rows = parse_layout(text)
    return HandSplit(name=text.strip(), firsts=_of_blocks([row.blocks for row in rows], layers))


def _of_counts(text: str, layers: Sequence[str]) -> tuple[int, ...]:
    if not _COUNTS.fullmatch(text):
        raise BaPipeError(f"counts look like 4,4,4, one for each stage, got '{text[:60]}'")
    counts = [int(part) for part in text.split(",")]
    if sum(counts) == len(layers) and all(counts):
        return tuple(itertools.accumulate(counts[:-1]))
    return _of_blocks(counts, layers)


def _of_blocks(counts: Sequence[int], layers: Sequence[str]) -> tuple[int, ...]:
    """The first layer of each stage but the first, of stages with so many blocks."""
    blocks = [block_of_layer(name) for name in layers]
    lists = dict.fromkeys(block[0] for block in blocks if block is not None)
    places = list(dict.fromkeys(block for block in blocks if block is not None))
    if len(lists) != 1 or sum(counts) != len(places):
        have = (
            f"{len(places)} blocks in {', '.join(lists)}" if len(lists) == 1 else f"{len(lists)} lists of blocks"
        )
        raise BaPipeError(
            f"the split has {sum(counts)} blocks, the model {len(layers)} layers and {have}; count either"
        )
    starts = [blocks.index(block) for block in places]
    after = max(index for index, block in enumerate(blocks) if block is not None) + 1
    firsts = [starts[done] if done < len(starts) else after for done in itertools.accumulate(counts[:-1])]
    for index, (first, end) in enumerate(itertools.pairwise([0, *firsts, len(layers)])):
        if first >= end:
            raise BaPipeError(f"stage {index} of the split has no layer; give it a block")
    return tuple(firsts)

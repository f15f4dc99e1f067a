"""A plan's stages as other engines name them: lists of the model's modules, or counts of its blocks.

BaPipe's layers are runs of operations: two of them may share a transformer block. Engines cut between modules. An
*atom* here is a module that they can cut before: an entry of a list of blocks, or a module beside such a list. A
cut inside of an atom moves to one of its ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan

__all__ = ["BlockStage", "ModuleStages", "block_of_layer", "block_stages", "module_stages", "stage_beginnings"]

_TABLE_BLOCK = re.compile(r"(block)-(\d+)(?:\.|$)")
"""a block of a built-in table, such as block-3.mlp"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStages:
    """The modules of each stage, and which cuts had to move for that."""

    stages: tuple[tuple[str, ...], ...]
    """paths in the order in which they run; a module without parts that several stages call is in each"""
    moved: tuple[str, ...]
    """a sentence for each cut inside of a module"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStage:
    """One stage of a model that is a list of blocks between an embedding and a head."""

    embedding: bool
    """whether it is the first, with what comes before the blocks"""
    blocks: int
    head: bool
    """whether it is the last, with what comes after the blocks"""


def module_stages(plan: Plan) -> ModuleStages:
    """Whole modules per stage. Raises BaPipeError where the plan does not know them or a stage is left without."""
    _require_modules(plan)
    spine = _spine([path for stage in plan.stages for path in stage.modules])
    parts: list[dict[str, int]] = [{} for _ in plan.stages]
    """per stage its atoms, and how many of each one's modules it has"""
    whole: set[str] = set()
    """atoms that have modules within"""
    for stage, own in zip(plan.stages, parts, strict=True):
        for path in stage.modules:
            atom = _atom(path, spine)
            if atom is not None:
                own[atom] = own.get(atom, 0) + 1
                whole |= {atom} if atom != path else set()
    for first, second in itertools.pairwise(range(len(parts))):
        if any(part.layer == plan.stages[second].first_layer for part in plan.stages[first].fractions):
            whole |= parts[first].keys() & parts[second].keys()
    moved = _move_cuts(parts, whole)
    for index, own in enumerate(parts):
        if not own:
            raise BaPipeError(
                f"stage {index} has no whole module ({', '.join(plan.stages[index].layers)[:120]}); "
                "plan with fewer --stages, or export --to torch, which cuts inside of modules"
            )
    return ModuleStages(stages=tuple(_joined(own, parts, spine) for own in parts), moved=moved)


def stage_beginnings(plan: Plan) -> tuple[str, ...]:
    """The module that each stage but the first begins with; cuts inside of blocks stay where they are."""
    _require_modules(plan)
    before: set[str] = set(plan.stages[0].modules)
    found = []
    for index, stage in enumerate(plan.stages[1:], 1):
        first = next((path for path in stage.modules if path and path not in before), None)
        if first is None:
            raise BaPipeError(f"stage {index} begins inside of a module, where torch cannot cut; plan again "
                              "without --split-layers")  # fmt: skip
        found.append(first)
        before |= set(stage.modules)
    return tuple(found)


def block_of_layer(name: str) -> tuple[str, int] | None:
    """(list, number) of the block that a layer belongs to, by its name; None: it is beside the blocks."""
    match = _TABLE_BLOCK.match(name)
    return (match[1], int(match[2])) if match else _block(name)


def block_stages(plan: Plan) -> tuple[tuple[BlockStage, ...], tuple[str, ...]]:
    """Blocks per stage, and the cuts that moved; for engines that know a model as so many equal blocks.

    Takes plans of built-in tables too, whose layers are named block-0.attention and so on. Raises BaPipeError
    where the model is no single list of blocks.
    """
    if any(stage.modules for stage in plan.stages):
        found = module_stages(plan)
        stages, moved = found.stages, found.moved
    else:
        stages, moved = _table_stages(plan)
    lists = dict.fromkeys(block[0] for stage in stages for path in stage if (block := _block(path)))
    if len(lists) != 1:
        have = ", ".join(lists) or "none"
        raise BaPipeError(
            f"this target takes a model with one list of blocks, {plan.model.name} has {have[:120]}; export it "
            "--to torch, automodel or device-map"
        )
    numbers = [[block[1] for path in stage if (block := _block(path))] for stage in stages]
    ordered = [number for own in numbers for number in own]
    if ordered != sorted(set(ordered)) or not all(numbers[1:-1]):
        raise BaPipeError(
            f"the blocks of {plan.model.name} do not follow one another from stage to stage; export it --to torch"
        )
    last = len(stages) - 1
    rows = tuple(
        BlockStage(embedding=index == 0, blocks=len(own), head=index == last) for index, own in enumerate(numbers)
    )
    return rows, moved


def _require_modules(plan: Plan) -> None:
    if any(stage.modules for stage in plan.stages):
        return
    if plan.model.ref is None:
        raise BaPipeError(
            f"{plan.model.name} is a table of layers, not a PyTorch model, so its modules have no names; profile "
            "your model (`bapipe profile package.module:function`) and plan it, or export --to megatron"
        )
    raise BaPipeError(
        f"the plan does not say which modules its layers are, as its profile is of an older BaPipe; run "
        f"`bapipe profile {plan.model.ref[:100]}` again and plan with that"
    )


def _table_stages(plan: Plan) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    parts: list[dict[str, int]] = [{} for _ in plan.stages]
    for stage, own in zip(plan.stages, parts, strict=True):
        for layer in stage.layers:
            block = block_of_layer(layer)
            name = layer if block is None else f"{block[0]}.{block[1]}".lstrip(".")
            own[name] = own.get(name, 0) + 1
    if not any(_block(name) for own in parts for name in own):
        _require_modules(plan)
    moved = _move_cuts(parts, {name for own in parts for name in own if _block(name)})
    return tuple(tuple(own) for own in parts), moved


def _block(path: str) -> tuple[str, int] | None:
    """(list, number) of the outermost numbered module on the path."""
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None


def _prefixes(path: str) -> list[str]:
    """'', 'a', 'a.b' of 'a.b.c'."""
    parts = path.split(".")
    return ["", *(".".join(parts[:length]) for length in range(1, len(parts)))] if path else []


def _spine(paths: Sequence[str]) -> set[str]:
    """Modules that cuts may go through: the model, lists of blocks and what holds them, and plain containers."""
    known = set(paths)
    spine = {""}
    for path in paths:
        block = _block(path)
        if block is not None:
            spine |= {block[0], *_prefixes(block[0])}
    inner: dict[str, set[str]] = {}
    for path in paths:
        chain = [*_prefixes(path), path]
        for holder, child in itertools.pairwise(chain):
            inner.setdefault(holder, set()).add(child)
    waiting = [child for holder in spine for child in inner.get(holder, ())]
    while waiting:
        path = waiting.pop()
        if path not in spine and path not in known and len(inner.get(path, ())) > 1:
            spine.add(path)
            waiting += inner[path]
    return spine


def _atom(path: str, spine: set[str]) -> str | None:
    """The outermost module on the path that is no spine; None for what runs in the spine's own forward."""
    return next((item for item in [*_prefixes(path), path] if item not in spine), None)


def _move_cuts(parts: list[dict[str, int]], whole: set[str]) -> tuple[str, ...]:
    """Leave each atom with modules within to the stage that has most of it, of equals to the first."""
    moved = []
    for index in range(len(parts)):
        for atom in list(parts[index]):
            holders = [place for place, own in enumerate(parts) if atom in own]
            if atom not in whole or len(holders) < 2:
                continue
            best = max(holders, key=lambda place: (parts[place][atom], -place))
            for place in holders:
                if place != best:
                    del parts[place][atom]
            listed = ", ".join(map(str, holders))
            moved.append(f"stages {listed} share '{atom}': all of it goes to stage {best}")
    return tuple(moved)


def _joined(own: dict[str, int], parts: Sequence[dict[str, int]], spine: set[str]) -> tuple[str, ...]:
    """The stage's modules, those of a plain container by its name where the stage has all of it."""
    lists = {block[0] for atoms in parts for atom in atoms if (block := _block(atom))}
    holders = {name for path in lists for name in ["", path, *_prefixes(path)]}
    others = {atom for atoms in parts if atoms is not own for atom in atoms}
    found: dict[str, None] = {}
    for atom in own:
        plain = [item for item in _prefixes(atom) if item in spine and item not in holders]
        name = next((p for p in plain if not any(item.startswith(f"{p}.") for item in others)), atom)
        found[name] = None
    return tuple(found)

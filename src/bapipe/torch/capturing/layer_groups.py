"""Layers that a person recognises: steps grouped between narrow cuts and named after module paths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from bapipe.torch.capturing.aliases import input_nodes
from bapipe.torch.capturing.crossing_values import Cuts, find_cuts
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import module_path, op_name

__all__ = ["Group", "group_layers"]

_FEW = 8
"""layers that an unnumbered module may have to be taken for one block"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Steps `start` to `stop` (exclusive) as one layer."""

    name: str
    start: int
    stop: int
    anchors: tuple[int, ...]
    """positions of the steps that use weights: products, look-ups, modules kept whole"""


def group_layers(program: Program, module: nn.Module) -> tuple[Group, ...]:
    """Cut between any two steps that use weights where fewest values and bytes cross, and keep the narrow cuts.

    A cut within a block (an entry of a ModuleList or Sequential, or a small module) goes if more values cross it
    than enter or leave the block: a transformer block becomes attention and MLP, a bottleneck stays whole.
    """
    cuts = find_cuts(program)
    anchors = [position for position, node in enumerate(program.steps) if _uses_weights(program, node)]
    end = len(program.steps)
    if not anchors:
        return (Group(name="model", start=0, stop=end, anchors=()),)
    paths = {position: _path(program, position) for position in anchors}
    blocks = _block_spans(module, anchors, paths)
    inside = _within_followers(program, anchors, paths)
    bounds = [0]
    for left, right in itertools.pairwise(anchors):
        best = _best_cut(cuts, left, right, inside)
        if best is not None:
            bounds.append(best)
    bounds.append(end)
    bounds = _drop_wide(cuts, bounds, blocks)
    bounds = _join_embeddings(program, anchors, paths, bounds)
    return _named(program, bounds, anchors, paths)


def _uses_weights(program: Program, node: fx.Node) -> bool:
    if node in program.calls:
        return True
    if op_name(node.target) in ("aten.embedding", "aten.embedding_bag"):
        # A table looked up at fixed places (learnt positions) is more of a bias than a layer.
        return _from_inputs(program, node.args[1])
    return bool(program.products[node]) and any(
        _from_weights(program, item) for item in input_nodes((node.args, node.kwargs))
    )


def _from_inputs(program: Program, argument: Any) -> bool:
    """Whether a value depends on the data of the model's inputs or on a step, not only on their sizes."""
    for node in input_nodes(argument):
        kind = program.kinds[node]
        if kind in ("input", "step"):
            return True
        if kind == "free" and op_name(node.target) != "aten.sym_size" and _from_inputs(program, node.args):
            return True
    return False


def _from_weights(program: Program, node: fx.Node, depth: int = 6) -> bool:
    """Whether a value comes from parameters alone, by a few steps (a transpose, a cast, a normalised weight)."""
    kind = program.kinds[node]
    if kind == "parameter":
        return True
    if kind != "step" or depth == 0 or program.products[node]:
        return False
    inputs = [item for item in input_nodes((node.args, node.kwargs)) if program.kinds[item] != "free"]
    return bool(inputs) and all(
        program.kinds[item] in ("buffer", "constant") or _from_weights(program, item, depth - 1) for item in inputs
    )


def _path(program: Program, position: int) -> str:
    node = program.steps[position]
    if node in program.calls:
        return program.calls[node].path
    path = module_path(node)
    if path:
        return path
    for item in input_nodes((node.args, node.kwargs)):
        if item in program.state and program.kinds[item] == "parameter":
            owner = program.state[item].rpartition(".")[0]
            return owner or program.state[item]
    return path


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    """position of its first anchor"""
    stop: int
    """position of its last anchor"""


def _block_spans(module: nn.Module, anchors: Sequence[int], paths: dict[int, str]) -> list[_Block]:
    """Modules that count as blocks: numbered ones, and others with few layers and nothing numbered within."""
    inside: dict[str, list[int]] = {}
    for position in anchors:
        parts = paths[position].split(".")
        for length in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:length]), []).append(position)
    numbered = {
        f"{path}.{name}".lstrip(".")
        for path, owner in module.named_modules()
        if isinstance(owner, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for name, _ in owner.named_children()
    }
    holders = {
        ".".join(path.split(".")[:length])
        for path in numbered & inside.keys()
        for length in range(1, path.count(".") + 1)
    }
    found = []
    for path, places in inside.items():
        if len(places) < 2 or (len(places) == len(anchors) and path not in numbered):
            continue
        if path in numbered or (path not in holders and len(places) <= _FEW):
            found.append(_Block(places[0], places[-1]))
    return found


def _within_followers(program: Program, anchors: Sequence[int], paths: dict[int, str]) -> frozenset[int]:
    """Cuts through the middle of a module without anchors, such as a norm."""
    holders = {".".join(paths[p].split(".")[:n]) for p in anchors for n in range(1, paths[p].count(".") + 2)}
    own = [module_path(node) for node in program.steps]
    return frozenset(p for p in range(1, len(own)) if own[p] and own[p - 1] == own[p] and own[p] not in holders)


def _best_cut(cuts: Cuts, left: int, right: int, inside: frozenset[int]) -> int | None:
    """Narrowest valid cut after `left` and not after `right`; of equals the last, so that followers stay."""
    options = [p for p in range(left + 1, right + 1) if cuts.valid[p]]
    if not options:
        return None
    return min(options, key=lambda p: (p in inside, cuts.count[p], cuts.bytes[p], -p))


def _drop_wide(cuts: Cuts, bounds: Sequence[int], blocks: Sequence[_Block]) -> list[int]:
    kept = [bounds[0]]
    for cut in bounds[1:-1]:
        inner = [block for block in blocks if block.start < cut <= block.stop]
        if all(cuts.count[cut] <= _outer_count(cuts, bounds, block) for block in inner):
            kept.append(cut)
    return [*kept, bounds[-1]]


def _outer_count(cuts: Cuts, bounds: Sequence[int], block: _Block) -> int:
    """Values that enter or leave a block, whichever are more, at the cuts around it."""
    entry = max((p for p in bounds if p <= block.start), default=0)
    leave = min((p for p in bounds if p > block.stop), default=bounds[-1])
    return max(cuts.count[entry], cuts.count[leave], 1)


def _join_embeddings(
    program: Program, anchors: Sequence[int], paths: dict[int, str], bounds: Sequence[int]
) -> list[int]:
    """Look-ups that follow each other under one module (tokens, positions) are one layer."""
    kept = [bounds[0]]
    for before, cut, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        here = [p for p in anchors if before <= p < after]
        look_ups = all(op_name(program.steps[p].target) == "aten.embedding" for p in here)
        parents = {paths[p].rpartition(".")[0] for p in here}
        if not (look_ups and len(parents) == 1):
            kept.append(cut)
    return [*kept, bounds[-1]]


def _named(
    program: Program, bounds: Sequence[int], anchors: Sequence[int], paths: dict[int, str]
) -> tuple[Group, ...]:
    spans = list(itertools.pairwise(bounds))
    members = [[p for p in anchors if start <= p < stop] for start, stop in spans]
    holders: dict[str, set[int]] = {}
    for index, places in enumerate(members):
        for position in places:
            parts = paths[position].split(".")
            for length in range(1, len(parts) + 1):
                holders.setdefault(".".join(parts[:length]), set()).add(index)
    names: list[str] = []
    used: dict[str, int] = {}
    for index, places in enumerate(members):
        common = _common([paths[p] for p in places])
        if not common or holders.get(common, set()) != {index}:
            heaviest = max(places, key=lambda p: (program.products[program.steps[p]], -p), default=None)
            own = paths[heaviest] if heaviest is not None else ""
            common = own or common
        common = _widest(common, index, holders) if common else common
        name = common or "model"
        used[name] = used.get(name, 0) + 1
        names.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return tuple(
        Group(name=name, start=start, stop=stop, anchors=tuple(places))
        for name, (start, stop), places in zip(names, spans, members, strict=True)
    )


def _widest(path: str, index: int, holders: dict[str, set[int]]) -> str:
    """The outermost module on the path that belongs to this layer alone; the path itself if there is none."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        if holders.get(prefix) == {index}:
            return prefix
    return path


def _common(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    split = [path.split(".") for path in paths]
    length = 0
    while all(len(parts) > length and parts[length] == split[0][length] for parts in split):
        length += 1
    return ".".join(split[0][:length])

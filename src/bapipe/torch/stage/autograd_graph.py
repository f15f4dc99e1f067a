"""Which weights of a stage's graph can wait for the second part of its backward, and where they hang.

Trunk, branches and stems are those of `bapipe.torch.stage.split_backward`. Nodes are found again in another
micro-batch's graph by their paths from the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["Anatomy", "Branch", "Stem", "dissect", "nodes_of"]

_Path = tuple[int, ...]
"""from an output to a node: the number of the output, then at each node which way to go on"""
_INDIVISIBLE = frozenset({"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"})
"""nodes that compute the input gradient again to get at the weights' gradient"""
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "ToCopy", "Slice")
    for number in (0, 1)
)
"""nodes that only show a weight in another way: the gradient of their result is that of the weight"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trunk node and the weights whose only way to the trunk it is."""

    path: _Path
    name: str
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """A node beside the trunk that all ways up from some weights go through."""

    path: _Path
    name: str
    results: tuple[int, ...]
    """the numbers of its results that others use"""
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Which weights wait for the second part."""

    branches: tuple[Branch, ...]
    stems: tuple[Stem, ...]
    early: tuple[int, ...]
    """weights that hang on several nodes without a stem"""
    free: tuple[int, ...]
    """weights that no trunk leads to"""


def dissect(roots: Sequence[Node | None], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Anatomy:
    """Of the graph below the roots; `inputs` are what gradients are wanted for."""
    order, paths, parents = _walk(roots)
    ends = {id(value): -1 for value in inputs} | {id(weight): number for number, weight in enumerate(weights)}
    trunk: set[Node] = set()
    holders: dict[int, Node] = {}
    for node in order:
        leaf = ends.get(id(getattr(node, "variable", None)))
        if leaf is not None and leaf >= 0:
            holders[leaf] = node
        if leaf == -1 or any(child in trunk for child, _ in node.next_functions):
            trunk.add(node)
    tops = {root for root in roots if root is not None}
    branches: dict[Node, list[int]] = {}
    stems: dict[Node, list[int]] = {}
    early, free = [], []
    place = {node: index for index, node in enumerate(order)}
    for number, holder in holders.items():
        joints, outside = _joints(holder, trunk, parents, tops)
        if len(joints) == 1 and not outside and joints[0].name() not in _INDIVISIBLE:
            branches.setdefault(joints[0], []).append(number)
        elif joints:
            stem = _stem(holder, trunk, parents, tops, place)
            if stem is None:
                early.append(number)
            else:
                stems.setdefault(stem, []).append(number)
        else:
            free.append(number)
    return Anatomy(
        branches=tuple(
            Branch(path=paths[node], name=node.name(), weights=tuple(numbers))
            for node, numbers in branches.items()
        ),
        stems=tuple(
            Stem(path=paths[node], name=node.name(), results=_results(node, parents), weights=tuple(numbers))
            for node, numbers in stems.items()
        ),
        early=tuple(early),
        free=tuple(free),
    )


def _stem(
    holder: Node, trunk: set[Node], parents: dict[Node, list[Node]], tops: set[Node], place: Mapping[Node, int]
) -> Node | None:
    """The uppermost node that all ways up from a weight go through before any of them leaves for the trunk or an
    output; None where there are only nodes below that show the weight in another way."""
    found, waiting, computes = None, {holder}, False
    while waiting:
        node = min(waiting, key=place.__getitem__)  # all that leads from the weight to it is behind
        waiting.discard(node)
        computes = computes or (node is not holder and node.name() not in _VIEWS)
        if computes and not waiting:
            found = node
        above = parents.get(node, ())
        if node in tops or any(parent in trunk for parent in above):
            break
        waiting.update(above)
    return found


def _results(node: Node, parents: dict[Node, list[Node]]) -> tuple[int, ...]:
    """The numbers of a node's results that others use."""
    uses = (edge for parent in parents.get(node, ()) for edge in parent.next_functions)
    return tuple(sorted({number for child, number in uses if child is node}))


def _walk(roots: Sequence[Node | None]) -> tuple[list[Node], dict[Node, _Path], dict[Node, list[Node]]]:
    """All nodes, each after those it leads to; a path to each; and who leads to it."""
    order: list[Node] = []
    paths: dict[Node, _Path] = {}
    parents: dict[Node, list[Node]] = {}
    for number, root in enumerate(roots):
        if root is None or root in paths:
            continue
        paths[root] = (number,)
        stack: list[tuple[Node, int]] = [(root, 0)]
        while stack:
            node, position = stack.pop()
            onward = node.next_functions
            while position < len(onward):
                child = onward[position][0]
                position += 1
                if child is None:
                    continue
                parents.setdefault(child, []).append(node)
                if child not in paths:
                    paths[child] = (*paths[node], position - 1)
                    stack.append((node, position))
                    stack.append((child, 0))
                    break
            else:
                order.append(node)
    return order, paths, parents


def _joints(
    holder: Node, trunk: set[Node], parents: dict[Node, list[Node]], tops: set[Node]
) -> tuple[list[Node], bool]:
    """The trunk nodes that a weight's branch hangs on, and whether it reaches an output beside the trunk."""
    joints: dict[Node, None] = {}
    outside = holder in tops
    seen, waiting = {holder}, [holder]
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent in trunk:
                joints[parent] = None
            elif parent not in seen:
                seen.add(parent)
                waiting.append(parent)
                outside = outside or parent in tops
    return list(joints), outside


def _follow(roots: Sequence[Node | None], path: _Path, known: dict[_Path, Any]) -> Node | None:
    """The node at the end of a path; paths share their beginnings, which are walked once."""
    depth = len(path)
    while depth > 1 and path[:depth] not in known:
        depth -= 1
    node = known.get(path[:depth])
    if depth == 1 and node is None:
        node = known[path[:1]] = roots[path[0]] if path[0] < len(roots) else None
    for position in range(depth, len(path)):
        if node is None:
            return None
        onward = node.next_functions
        node = onward[path[position]][0] if path[position] < len(onward) else None
        known[path[: position + 1]] = node
    return node


def nodes_of(anatomy: Anatomy, roots: Sequence[Node | None]) -> tuple[list[Node], list[Node]] | None:
    """The nodes of the branches, and of the stems, below these roots; None if the graph is another one."""
    known: dict[_Path, Any] = {}

    def found(parts: Sequence[Branch | Stem]) -> list[Node] | None:
        nodes = []
        for part in parts:
            node = _follow(roots, part.path, known)
            if node is None or node.name() != part.name:
                return None
            nodes.append(node)
        return nodes

    branches, stems = found(anatomy.branches), found(anatomy.stems)
    return None if branches is None or stems is None else (branches, stems)

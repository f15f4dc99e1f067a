"""PipeDream's graph.txt (msr-fiddle/pipedream) -> Profile.

    nodeK -- description -- forward_compute_time=MS, backward_compute_time=MS, activation_size=B, parameter_size=B
    <tab>nodeA -- nodeB

Times are milliseconds, sizes bytes; activation_size may be a list "[a; b]", which counts as its sum. The graph is
a DAG; the nodes are put in a row (by their numbers, where the edges allow, or as a pipeline is cut best) and a cut
between two of them carries, once, every value that was made before it and is needed after it, passed along stage
by stage.

- Nodes that nothing feeds, without parameters, named Input or free of time, are inputs of the model, not layers:
  their time (loading of data) is left out, and their values count in the forward direction only.
- A node that takes no time and has no parameters (views, sums, tuple items) joins a layer beside it: between two
  layers there is one place to cut, the one that least crosses, of equals the last.
- Errors are as large as the values; a `Size` has none.
- Saved activations: each value is kept by the layer that first reads it; an in-place result or a view lives in the
  storage of the source made last and is not counted again. What kernels keep for themselves (cuDNN's reserve,
  masks) is not in such a file.
- The file has no times of the optimizer step: they are 0.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.costs.fields import COST_FIELDS, CostTable, Rows, as_tuples
from bapipe.costs.graph_orders import best_row
from bapipe.costs.profile import Profile, ProfiledLayer
from bapipe.errors import BaPipeError, FileFormatError, nearest
from bapipe.io.files import read_text
from bapipe.models.layers import ModelRef

__all__ = ["PIPEDREAM_ACCELERATOR", "read_pipedream_graph", "scaled_profile"]

PIPEDREAM_ACCELERATOR = "v100-16"
_DEFAULT_BATCH = 128
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"node[0-9]{1,9}")
_CONVOLUTION = re.compile(r"Conv2d\(\d{1,9}, ([1-9]\d{0,8}),")
_LINEAR = re.compile(r"Linear\(in_features=\d{1,9}, out_features=([1-9]\d{0,8}),")
_VIEW = re.compile(r"(?:\w+\(inplace(?:=True)?\)|View\b|__getitem__\b|Size\b)")
"""results that live in the storage of their input"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    description: str
    forward: float
    """seconds"""
    backward: float
    activation: float
    """bytes"""
    parameters: float
    """bytes"""

    @property
    def number(self) -> int:
        return int(self.name.removeprefix("node"))

    @property
    def free(self) -> bool:
        return self.forward == 0 and self.backward == 0 and self.parameters == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    nodes: dict[str, _Node]
    before: dict[str, list[str]]
    after: dict[str, list[str]]


def _amount(text: str, *, where: str, name: str) -> float:
    """A number, or a list "[a; b]" of them, summed."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        values = [float(part) for part in inner.split(";")]
    except ValueError:
        raise FileFormatError(f"{where}: {name} is not a number: '{text[:60]}'; correct it") from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise FileFormatError(f"{where}: {name} must be finite and at least 0, got '{text[:60]}'; correct it")
    return sum(values)


def _node(parts: list[str], *, where: str) -> _Node:
    if len(parts) > 3 and parts[-1].startswith("stage_id="):
        parts = parts[:-1]
    if len(parts) < 3:
        raise FileFormatError(f"{where}: expected 'nodeK -- description -- times and sizes'; is the line cut off?")
    values: dict[str, float] = {}
    for item in parts[-1].split(", "):
        name, _, text = item.strip().partition("=")
        if name not in _FIELDS:
            raise FileFormatError(f"{where}: unknown entry '{name[:60]}'{nearest(name, _FIELDS)}; remove it")
        values[name] = _amount(text, where=where, name=name)
    for name in _FIELDS:
        if name not in values:
            raise FileFormatError(f"{where}: '{name}' is missing; is the line cut off?")
    return _Node(
        name=parts[0],
        description=" -- ".join(parts[1:-1]),
        forward=values["forward_compute_time"] / 1e3,
        backward=values["backward_compute_time"] / 1e3,
        activation=values["activation_size"],
        parameters=values["parameter_size"],
    )


def _parse(text: str, *, path: str) -> _Graph:
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if not _NODE.fullmatch(parts[0]):
            raise FileFormatError(f"{where}: expected a node such as 'node1', got '{parts[0][:60]}'; correct it")
        if line[0].isspace():
            if len(parts) != 2 or not _NODE.fullmatch(parts[1]):
                raise FileFormatError(f"{where}: expected an edge 'nodeA -- nodeB', got '{line.strip()[:60]}'")
            edges.setdefault((parts[0], parts[1]), number)
            continue
        node = _node(parts, where=where)
        if node.name in nodes:
            raise FileFormatError(f"{where}: {node.name} is there twice; remove one")
        nodes[node.name] = node
    if not nodes:
        raise FileFormatError(f"{path} has no nodes; is it a PipeDream graph.txt?")
    before: dict[str, list[str]] = {name: [] for name in nodes}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for (first, second), number in edges.items():
        for name in (first, second):
            if name not in nodes:
                raise FileFormatError(f"{path}, line {number}: {name} is no node of this file; correct the edge")
        before[second].append(first)
        after[first].append(second)
    return _Graph(nodes=nodes, before=before, after=after)


def _order(graph: _Graph, *, path: str) -> list[str]:
    """Topological order, the lowest node number first where several could come."""
    missing = {name: len(sources) for name, sources in graph.before.items()}
    ready = [(graph.nodes[name].number, name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for target in graph.after[name]:
            missing[target] -= 1
            if missing[target] == 0:
                heapq.heappush(ready, (graph.nodes[target].number, target))
    if len(order) < len(graph.nodes):
        stuck = min(
            (name for name, count in missing.items() if count > 0), key=lambda name: graph.nodes[name].number
        )
        raise FileFormatError(f"{path}: the edges form a circle through or before {stuck}; remove one of them")
    return order


def _is_size(node: _Node) -> bool:
    """A shape, which is no tensor and has no error."""
    return node.description.startswith("Size(")


def _groups(graph: _Graph, order: list[str], inputs: set[str], errors: set[str]) -> list[list[str]]:
    """Layers: each node that takes time or has parameters, with the free ones around it.

    Free nodes between two others go with the one or the other so that least crosses, of equals with the first.
    """
    names = [name for name in order if name not in inputs]
    timed = [place for place, name in enumerate(names) if not graph.nodes[name].free]
    if not timed:
        return [names] if names else []
    each = {name: place for place, name in enumerate(names)}
    ahead, back = (row[0] for row in _boundaries(graph, each, len(names), errors))
    starts = [0]
    for before, after in itertools.pairwise(timed):
        starts.append(1 + min(range(after - 1, before - 1, -1), key=lambda place: ahead[place] + back[place]))
    return [names[first:stop] for first, stop in itertools.pairwise((*starts, len(names)))]


def _with_error(graph: _Graph, order: list[str], inputs: set[str]) -> set[str]:
    """Nodes whose value an error comes back for: those that a parameter reaches or whose backward takes time."""
    found: set[str] = set()
    for name in order:
        node = graph.nodes[name]
        if name in inputs or _is_size(node):
            continue
        if node.parameters > 0 or node.backward > 0 or any(source in found for source in graph.before[name]):
            found.add(name)
    return found


def _boundaries(graph: _Graph, layer_of: dict[str, int], count: int, errors: set[str]) -> tuple[Rows, Rows]:
    """Bytes alive across the cut after each layer; inputs of the model are there from the first layer on."""
    forward_steps, backward_steps = [0.0] * (count + 1), [0.0] * (count + 1)
    for name, node in graph.nodes.items():
        start = layer_of.get(name, 0)
        end = max((layer_of[target] for target in graph.after[name] if target in layer_of), default=start)
        for steps, counts in ((forward_steps, True), (backward_steps, name in errors)):
            if counts and end > start:
                steps[start] += node.activation
                steps[end] -= node.activation
    rows = []
    for steps in (forward_steps, backward_steps):
        alive, row = 0.0, []
        for step in steps[:count]:
            alive += step
            row.append(max(alive, 0.0))
        rows.append((tuple(row),))
    return rows[0], rows[1]


def _storages(graph: _Graph, order: list[str]) -> dict[str, str]:
    """View or in-place result -> the node in whose storage it lives, the one made last among its sources."""
    position = {name: index for index, name in enumerate(order)}
    storages = {}
    for name in order:
        sources = [item for item in graph.before[name] if not _is_size(graph.nodes[item])]
        if _VIEW.match(graph.nodes[name].description) and sources:
            storages[name] = max(sources, key=position.__getitem__)
    return storages


def _saved_activations(graph: _Graph, order: list[str], layer_of: dict[str, int], count: int) -> tuple[float, ...]:
    """Each storage once, at the first layer that reads it, through views too."""
    storages = _storages(graph, order)
    first_reader: dict[str, int] = {}
    saved_activations = [0.0] * count
    for name in reversed(order):
        readers = []
        for target in graph.after[name]:
            if target not in storages:
                readers.append(layer_of[target])
            elif storages[target] == name and target in first_reader:
                readers.append(first_reader[target])
        if readers:
            first_reader[name] = min(readers)
            if name not in storages:
                saved_activations[first_reader[name]] += graph.nodes[name].activation
    return tuple(saved_activations)


def read_pipedream_graph(
    path: str | Path, *, batch: int | None = None, pipeline: tuple[int, float] | None = None
) -> Profile:
    """The profile of a graph.txt, at the one micro-batch size `batch` that it was measured with.

    The file does not say it. None: of a convolutional network as its activations have it, else 128, which the
    table's description says; PipeDream's GNMT is of 32. `pipeline` has the accelerators and the links' bytes/s for
    which the row of nodes of a branched graph is chosen (`best_row`); None: by their numbers.
    """
    if batch is not None and batch < 1:
        raise BaPipeError(
            f"the batch of a profile must be at least 1, got {batch}; give the size it was measured at"
        )
    graph = _parse(read_text(path), path=str(path))
    order = _order(graph, path=str(path))
    inferred = _inferred_batch([graph.nodes[name] for name in order]) if batch is None else None
    size = batch or inferred or _DEFAULT_BATCH
    inputs = {
        name
        for name in order
        if not graph.before[name]
        and graph.nodes[name].parameters == 0
        and (graph.nodes[name].free or graph.nodes[name].description.startswith("Input"))
    }
    numbered = order
    if pipeline is not None:
        order = _placed(graph, order, inputs, *pipeline)
    errors = _with_error(graph, order, inputs)
    groups = _groups(graph, order, inputs, errors)
    if not groups:
        raise FileFormatError(f"{path} has inputs but no layers; is it a PipeDream graph.txt?")
    layer_of = {name: index for index, group in enumerate(groups) for name in group}
    boundary_forward, boundary_backward = _boundaries(graph, layer_of, len(groups), errors)

    def total(field: str) -> tuple[float, ...]:
        return tuple(sum(getattr(graph.nodes[name], field) for name in group) for group in groups)

    weights = total("parameters")
    assumed = ""
    if batch is None:
        assumed = ", as its activations have it" if inferred else ", assumed as the file does not say it"
    table = CostTable(
        source="measured",
        description=f"PipeDream's published profile {Path(path).name} (msr-fiddle/pipedream, MIT), V100-class "
        f"GPU, fp32, batch {size}{assumed}; optimizer step not in the file"
        + ("" if order == numbered else "; nodes in another order than by number"),
        microbatches=(size,),
        forward=(total("forward"),),
        backward=(total("backward"),),
        boundary_forward=boundary_forward,
        boundary_backward=boundary_backward,
        saved_activations=(_saved_activations(graph, order, layer_of, len(groups)),),
        update=(0.0,) * len(groups),
    )
    return Profile(
        model=ModelRef(name=Path(path).name.removesuffix(".txt").removesuffix(".graph")),
        dtype="fp32",
        layers=tuple(
            ProfiledLayer(name=_layer_name(graph, group), parameters=round(weight / 4), weight_bytes=weight)
            for group, weight in zip(groups, weights, strict=True)
        ),
        accelerators={PIPEDREAM_ACCELERATOR: table},
        input_bytes=sum(graph.nodes[name].activation for name in inputs) / size,
    )


def _placed(graph: _Graph, order: list[str], inputs: set[str], stages: int, bandwidth: float) -> list[str]:
    """The nodes in the order that up to so many stages over such links are cut best from, inputs first."""
    names = [name for name in order if name not in inputs]
    row = best_row(
        names,
        {name: graph.after[name] for name in names},
        work={name: graph.nodes[name].forward + graph.nodes[name].backward for name in names},
        sizes={name: graph.nodes[name].activation for name in names},
        stages=stages,
        bandwidth=bandwidth,
    )
    return order if row == names else [*(name for name in order if name in inputs), *row]


def _inferred_batch(nodes: Iterable[_Node]) -> int | None:
    """Samples of a convolutional network's activations; None where they do not tell.

    The last Linear makes `out_features` numbers of 4 bytes for each sample. The first convolution must agree: so
    many samples of its channels are squares. Where there is no convolution a Linear may see words, not samples.
    """
    first = last = None
    for node in nodes:
        made = _CONVOLUTION.match(node.description)
        if made and first is None:
            first = node.activation / (4 * int(made[1]))
        made = _LINEAR.match(node.description)
        if made:
            last = node.activation / (4 * int(made[1]))
    if first is None or last is None or last < 1 or last != int(last):
        return None
    pixels = first / last
    return int(last) if pixels >= 1 and math.isqrt(int(pixels)) ** 2 == pixels else None


def _layer_name(graph: _Graph, group: list[str]) -> str:
    """node7 LSTM: the node that takes the time, with the head of its description."""
    main = next((name for name in group if not graph.nodes[name].free), group[0])
    return f"{main} {graph.nodes[main].description.split('(')[0][:60]}".strip()


def scaled_profile(profile: Profile, sizes: Iterable[int]) -> Profile:
    """The profile at other micro-batch sizes: times by (B + 1)/(B0 + 1), bytes by B/B0; labelled analytic.

    B0 is the largest size that was measured. The rule says that a micro-batch costs as much as its samples and one
    more, which is how small micro-batches lose efficiency.
    """
    wanted = tuple(sorted(set(sizes)))
    if not wanted or wanted[0] < 1:
        raise BaPipeError(f"micro-batch sizes must be at least 1, got {list(wanted)[:8]}; name at least one")
    return replace(
        profile, accelerators={name: _scaled(table, wanted) for name, table in profile.accelerators.items()}
    )


def _scaled(table: CostTable, sizes: tuple[int, ...]) -> CostTable:
    base = table.microbatches[-1]
    changed: dict[str, Any] = {}
    for name, rule in COST_FIELDS.items():
        given = getattr(table, name)
        if given is not None and rule.per != "layer":
            more = 1 if rule.unit == "seconds" else 0
            rows = [np.array(given[-1]) * (size + more) / (base + more) for size in sizes]
            changed[name] = as_tuples(np.array(rows))
    return replace(
        table,
        source="analytic",
        description=f"{table.description}; scaled from batch {base}, times by (B+1)/({base}+1), bytes by B/{base}",
        microbatches=sizes,
        not_fitting=(),
        **changed,
    )

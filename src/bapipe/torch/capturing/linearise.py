"""From an exported graph to consecutive steps, apart from what any stage computes for itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from bapipe.torch.capturing.aliases import Storages, draws_random, input_nodes, region_of, storages
from bapipe.torch.capturing.export import Exported
from bapipe.torch.capturing.flops import Sizes, elements_written, product_flops
from bapipe.torch.capturing.gradients import nodes_with_gradient
from bapipe.torch.capturing.graph_cleanup import clean, correct_states
from bapipe.torch.capturing.leaf_modules import OPAQUE_OP, OpaqueCall
from bapipe.torch.capturing.torch_internals import call_structure, op_name, placeholders, size_at

__all__ = [
    "RECOMPUTE_ALWAYS",
    "RECOMPUTE_SHARE",
    "Program",
    "canonical_names",
    "linearise",
]

RECOMPUTE_SHARE = 1e-3
"""of all operations, what one node may cost to be recomputed on every stage that needs it"""

RECOMPUTE_ALWAYS = 2**16
"""operations that are too few to ask"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A traced module in one line. Nodes are those of `graph`; positions count `steps`."""

    graph: fx.Graph
    owner: nn.Module
    """holds the graphs of regions that cannot be cut (no_grad, autocast), by the names of get_attr nodes"""
    steps: tuple[fx.Node, ...]
    """what is computed once, in order"""
    position: dict[fx.Node, int]
    kinds: dict[fx.Node, str]
    """parameter, buffer, constant, input, region, free (recomputed anywhere) or step"""
    state: dict[fx.Node, str]
    """of parameters and buffers the model's own name; the first, where several name the same"""
    constants: dict[fx.Node, Tensor]
    inputs: tuple[fx.Node, ...]
    """one per leaf of (args, kwargs)"""
    outputs: tuple[Any, ...]
    """one per leaf of the output: a node or a constant"""
    in_spec: Any
    out_spec: Any
    locks: tuple[tuple[int, int, str], ...]
    """(a, b, why): no cut at positions a < p <= b"""
    random: dict[fx.Node, int]
    """nodes that draw random numbers, numbered through the whole graph"""
    gradients: frozenset[fx.Node]
    """nodes whose value may have a gradient"""
    products: dict[fx.Node, float]
    """floating-point operations of products, at the example's batch"""
    calls: dict[fx.Node, OpaqueCall]
    batch: int
    dynamic: bool
    users: dict[fx.Node, tuple[fx.Node, ...]]
    """steps that need a value, be it through free nodes; not for free nodes themselves"""
    storages: Storages
    spans: tuple[tuple[fx.Node, int, int], ...]
    """(value, first, last): it crosses the cuts before steps first <= p <= last"""

    def sizes(self, tensor: Tensor, batch: int | None = None) -> tuple[int, ...]:
        """The shape at a number of samples."""
        return tuple(size_at(size, batch or self.batch) for size in tensor.shape)


def linearise(exported: Exported, module: nn.Module) -> Program:
    """Order the graph, drop what has no effect, and tell apart what is computed once and what anywhere.

    Linear in nodes, but for the few kept locks.
    """
    program = exported.program
    graph, owner = program.graph, program.graph_module
    batch = exported.examples.batch
    clean(graph, owner)
    correct_states(graph)

    def sizes(tensor: Tensor) -> tuple[int, ...]:
        return tuple(size_at(size, batch) for size in tensor.shape)

    names = canonical_names(module)
    kinds: dict[fx.Node, str] = {}
    state: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Tensor] = {}
    inputs: list[fx.Node] = []
    for item in placeholders(program):
        kinds[item.node] = item.kind
        if item.kind in ("parameter", "buffer"):
            state[item.node] = names.get(str(item.target), str(item.target))
        elif item.kind == "constant":
            constants[item.node] = program.constants[str(item.target)]
        elif item.kind == "input":
            inputs.append(item.node)
    found = storages(graph, owner)
    _same_state(found, state)
    operations = [node for node in graph.nodes if node.op == "call_function"]
    products = {node: _region_flops(node, owner, sizes) for node in operations}
    written = {node: elements_written(node, sizes) for node in operations}
    drawing = {node for node in operations if draws_random(node, owner)}
    mutated = found.written
    limit = max(RECOMPUTE_ALWAYS, RECOMPUTE_SHARE * (sum(products.values()) + sum(written.values())))
    for node in graph.nodes:
        if node.op == "get_attr":
            kinds[node] = "region"
        elif node.op == "call_function":
            free = _is_free(node, kinds, found, mutated, drawing, products[node] + written[node] <= limit)
            kinds[node] = "free" if free else "step"
    output = next(node for node in graph.nodes if node.op == "output")
    outputs = tuple(output.args[0]) if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    fixed = drawing | {node for node in operations if products[node]}
    steps = _order([node for node in operations if kinds[node] == "step"], kinds, found, fixed)
    position = {node: index for index, node in enumerate(steps)}
    users = _users(graph, kinds, position)
    calls = {node: exported.calls[str(node.args[1])] for node in steps if op_name(node.target) == OPAQUE_OP}
    in_spec, out_spec = call_structure(program)
    gradients = nodes_with_gradient(graph, kinds, module, state, calls, found)
    return Program(
        graph=graph,
        owner=owner,
        steps=tuple(steps),
        position=position,
        kinds=kinds,
        state=state,
        constants=constants,
        inputs=tuple(inputs),
        outputs=outputs,
        in_spec=in_spec,
        out_spec=out_spec,
        locks=tuple(_locks(steps, position, users, found, calls)),
        random={node: index for index, node in enumerate(node for node in operations if node in drawing)},
        gradients=gradients,
        products=products,
        calls=calls,
        batch=batch,
        dynamic=exported.dynamic,
        users=users,
        storages=found,
        spans=tuple(_spans(steps, position, users, [node for node in inputs if node in gradients], outputs)),
    )


def _region_flops(node: fx.Node, owner: nn.Module, sizes: Sizes) -> float:
    """Operations of a node's products, those of a region (no_grad, autocast) included."""
    region = region_of(node, owner)
    if region is None:
        return product_flops(node, sizes)
    inner = (item for item in region.graph.nodes if item.op == "call_function")
    return sum(_region_flops(item, region, sizes) for item in inner)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _same_state(found: Storages, state: dict[fx.Node, str]) -> None:
    """Placeholders of one tensor under two names share a storage."""
    first: dict[str, fx.Node] = {}
    same = {node: first.setdefault(name, node) for node, name in state.items()}
    for table in (found.bases, found.writes):
        for node, bases in table.items():
            if any(base in same for base in bases):
                table[node] = frozenset(same.get(base, base) for base in bases)


def _is_free(
    node: fx.Node,
    kinds: dict[fx.Node, str],
    found: Storages,
    written: frozenset[fx.Node],
    drawing: set[fx.Node],
    cheap: bool,
) -> bool:
    if op_name(node.target) == "aten.sym_size":
        return True
    if not cheap or node in drawing or node in found.writes or found.bases[node] & written:
        return False
    for item in input_nodes((node.args, node.kwargs)):
        kind = kinds[item]
        if kind in ("parameter", "step", "object"):
            return False
        if kind == "input" and isinstance(value := item.meta.get("val"), Tensor) and value.requires_grad:
            return False
        if found.bases[item] & written:
            return False
    return True


def _order(steps: list[fx.Node], kinds: dict[fx.Node, str], found: Storages, fixed: set[fx.Node]) -> list[fx.Node]:
    """Program order, but what is looked up or made of parameters and inputs alone comes just before its use.

    Products, random draws (which are `fixed`) and writes keep their places, so that layers stay in the order of
    the program and the generator is used as in the original.
    """
    place = {node: index for index, node in enumerate(steps)}
    written = found.written
    key: dict[fx.Node, tuple[int, int, int]] = {}
    late: set[fx.Node] = set()
    for node in steps:
        before = [item for item in input_nodes((node.args, node.kwargs)) if kinds[item] == "step"]
        read = (base for item in input_nodes((node.args, node.kwargs)) for base in found.bases[item])
        pure = node not in fixed and node not in found.writes and written.isdisjoint((*found.bases[node], *read))
        if pure and all(item in late and len(item.users) == 1 for item in before):
            late.add(node)
    for node in reversed(steps):
        needed = [key[user][0] for user in node.users if user in key]
        if node in late and needed and len(needed) == len(node.users):
            key[node] = (min(needed), 0, place[node])
        else:
            key[node] = (place[node], 1, place[node])
    ordered = sorted(steps, key=key.__getitem__)
    taken: set[fx.Node] = set()
    result: list[fx.Node] = []
    for node in ordered:
        if node in taken:
            continue
        result.append(node)
        for user in node.users:
            if op_name(user.target) == "operator.getitem" and user in place and user not in taken:
                taken.add(user)
                result.append(user)
    return result


def _users(
    graph: fx.Graph, kinds: dict[fx.Node, str], position: dict[fx.Node, int]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Who needs a value that crosses cuts; sizes of it do not count, as they are had otherwise."""
    through: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(list(graph.nodes)):
        needed: set[fx.Node] = set()
        for user in node.users:
            if user.op == "output":
                continue
            if user in position:
                needed.add(user)
            elif kinds.get(user) == "free" and op_name(user.target) != "aten.sym_size":
                needed |= through.get(user, set())
        through[node] = needed
    return {node: tuple(sorted(needed, key=position.__getitem__)) for node, needed in through.items()}


def _spans(
    steps: list[fx.Node],
    position: dict[fx.Node, int],
    users: dict[fx.Node, tuple[fx.Node, ...]],
    trained_inputs: list[fx.Node],
    outputs: Iterable[Any],
) -> Iterable[tuple[fx.Node, int, int]]:
    """Where values cross; inputs that have a gradient travel along the chain, other inputs come from the data."""
    wanted = {node for node in outputs if isinstance(node, fx.Node)}
    for node in (*trained_inputs, *steps):
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        last = len(steps) - 1 if node in wanted else position[users[node][-1]] if users[node] else -1
        first = position[node] + 1 if node in position else 1
        if first <= last:
            yield node, first, last


def _locks(
    steps: list[fx.Node],
    position: dict[fx.Node, int],
    users: dict[fx.Node, tuple[fx.Node, ...]],
    found: Storages,
    calls: dict[fx.Node, OpaqueCall],
) -> Iterable[tuple[int, int, str]]:
    accesses: dict[fx.Node, list[int]] = {}
    last_write: dict[fx.Node, int] = {}
    for node in steps:
        for item in input_nodes((node.args, node.kwargs)):
            for base in found.bases[item]:
                accesses.setdefault(base, []).append(position[node])
        for base in found.writes.get(node, ()):
            last_write[base] = position[node]
    for base, last in last_write.items():
        if base in position:
            yield position[base], last, f"'{base.name}' is written in place"
        else:
            yield min(accesses[base]), max(accesses[base]), f"'{base.name}' is changed in place"
    for node in steps:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) and value is not None and users[node]:
            yield position[node], position[users[node][-1]], f"'{node.name}' is not a tensor"
    whole: dict[str, list[int]] = {}
    for node, call in calls.items():
        whole.setdefault(call.path, []).append(position[node])
    for path, places in whole.items():
        yield min(places), max(places), f"'{path}' is kept as a leaf module"

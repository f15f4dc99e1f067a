"""All that capture uses of torch's private parts, in one place: a test fails when something here moves.

Written against torch 2.11 and 2.13. Nothing else under `bapipe.torch.capturing` may touch a name of torch that
begins with an underscore.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "ArgumentUse",
    "Flat",
    "Placeholder",
    "TreeSpec",
    "argument_names",
    "call_structure",
    "depends_on_data",
    "flatten",
    "flatten_recurrent",
    "function_classes",
    "given_arguments",
    "is_symbolic",
    "load_tracer",
    "lstms_traced_whole",
    "module_path",
    "op_name",
    "operator_use",
    "placeholders",
    "register_dataclasses",
    "size_at",
    "swap_parameter",
    "symbols",
    "temporary_bytes",
    "unflatten",
]

TreeSpec = _pytree.TreeSpec
Flat = list[Any]


def load_tracer() -> threading.Thread:
    """Begin to load what `torch.export.export` needs, some five seconds, beside work that leaves Python free.

    Not beside imports of other people's modules: two threads that load the same ones can see them half made.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch.export._trace",), daemon=True)
    thread.start()
    return thread


def flatten(tree: Any) -> tuple[Flat, TreeSpec]:
    """Leaves of nested tuples, lists, dicts, registered dataclasses; None is a leaf."""
    leaves, spec = _pytree.tree_flatten(tree)
    return leaves, spec


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The tree that `flatten` took apart."""
    return _pytree.tree_unflatten(list(leaves), spec)


def register_dataclasses(tree: Any) -> None:
    """Make pytree nodes of the dataclasses in nested tuples, lists and dicts that are not yet."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            register_dataclasses(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            register_dataclasses(item)
    elif hasattr(type(tree), "__dataclass_fields__"):
        if type(tree) not in _pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(tree))
        for name in tree.__dataclass_fields__:
            register_dataclasses(getattr(tree, name, None))


def argument_names(target: Any) -> tuple[str, ...]:
    """The arguments of an operator by name, in order; () for what is no operator."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    return tuple(argument.name for argument in target._schema.arguments)


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a traced call by name, without those that have their default.

    So it does not matter how the trace has written them, nor which arguments with a default a version of torch has
    added. Of what is no operator positional arguments have their number for a name.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {**{str(index): value for index, value in enumerate(node.args)}, **node.kwargs}
    found: dict[str, Any] = {}
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            value = node.args[index]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            continue
        if not argument.has_default_value() or not _equal(value, argument.default_value):
            found[argument.name] = value
    return found


def _equal(value: Any, default: Any) -> bool:
    """Whether a constant argument is its default; sizes and values of the trace are not compared."""
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return len(value) == len(default) and all(map(_equal, value, default))
    return type(value) is type(default) and bool(value == default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """One input of an exported graph."""

    node: fx.Node
    kind: str
    """parameter, buffer, constant, object or input"""
    target: str | None
    """the name of the parameter, buffer or constant"""


_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.CUSTOM_OBJ: "object",
    InputKind.USER_INPUT: "input",
}


def placeholders(program: ExportedProgram) -> Iterator[Placeholder]:
    """The inputs of the graph in order, with what each stands for."""
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        yield Placeholder(node=node, kind=_KINDS.get(spec.kind, "object"), target=spec.target)


def call_structure(program: ExportedProgram) -> tuple[TreeSpec, TreeSpec]:
    """How (args, kwargs) and the output are nested."""
    spec = program.call_spec
    if spec.in_spec is None or spec.out_spec is None:
        raise RuntimeError("the exported program has no call specification")
    return spec.in_spec, spec.out_spec


def op_name(target: Any) -> str:
    """`aten.linear` for an operator, `operator.getitem` or the function's own name otherwise."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target._name}"
    module = getattr(target, "__module__", "") or ""
    return f"{module.lstrip('_')}.{getattr(target, '__name__', str(target))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentUse:
    """What an operator does with one of its arguments."""

    name: str
    written: bool
    aliased: bool
    """whether an output may be a view of it, or it itself"""


_USES: dict[Any, tuple[tuple[ArgumentUse, ...], bool]] = {}


def operator_use(target: Any) -> tuple[tuple[ArgumentUse, ...], bool] | None:
    """Per argument of the schema its use, and whether the operator draws random numbers; None: no operator."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    known = _USES.get(target)
    if known is None:
        loose = getattr(torch.Tag, "maybe_aliasing_or_mutating", None) in target.tags
        fresh = loose and not any(item.alias_info for item in target._schema.returns)
        returned = {name for item in target._schema.returns if item.alias_info for name in _sets(item.alias_info)}
        uses = []
        for position, argument in enumerate(target._schema.arguments):
            info = argument.alias_info
            aliased = bool(info and (_sets(info) & returned or "*" in info.after_set))
            written = bool(info and info.is_write)
            uses.append(
                ArgumentUse(name=argument.name, written=written, aliased=aliased or (fresh and position == 0))
            )
        known = tuple(uses), torch.Tag.nondeterministic_seeded in target.tags
        _USES[target] = known
    return known


def _sets(info: Any) -> set[str]:
    return set(info.before_set) | set(info.after_set)


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that was running when the node was traced; '' is the root."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        name = entry[0] if isinstance(entry, tuple) else ""
        if not name.startswith("_empty_nn_module_stack"):
            path = name
    # A module called twice is "path@1" the second time; a path through a getattr'ed call keeps its own spelling.
    return path.split("@")[0]


def depends_on_data(value: Any) -> bool:
    """Whether a number of the trace was read from a tensor (`.item()`), so that it differs from batch to batch."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # loaded with the tracer

    return bool(free_unbacked_symbols(value))


def is_symbolic(value: Any) -> bool:
    """Whether a size is free; a symbol that the trace has fixed to a number is not."""
    return bool(symbols(value))


def symbols(value: Any) -> frozenset[str]:
    """Names of the symbols that a size depends on."""
    if not isinstance(value, torch.SymInt):
        return frozenset()
    return frozenset(str(symbol) for symbol in value.node.expr.free_symbols)


_AT: dict[tuple[Any, int], int] = {}


def size_at(value: int | torch.SymInt, batch: int) -> int:
    """A size with every symbol set to `batch`; all backed symbols stand for the number of samples.

    A size that depends on data has no such value and counts as if it were that number too.
    """
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    key = (expression, batch)
    found = _AT.get(key)
    if found is None:
        found = int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))
        if len(_AT) > 100_000:
            _AT.clear()
        _AT[key] = found
    return found


def swap_parameter(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Put another tensor in a parameter's or buffer's place, keeping it registered as what it is."""
    if name in module._parameters:
        module._parameters[name] = tensor  # type: ignore[assignment]
    else:
        module._buffers[name] = tensor


def flatten_recurrent(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Lay the weights of each recurrent layer in one piece of GPU memory, as cuDNN wants them.

    `weights` are those of a stage, by the module's names; a layer of which it has only some is left as it is.
    Weights that lie apart are copied in every forward, and the backward keeps the copy.
    """
    for path, layer in module.named_modules():
        if not isinstance(layer, nn.RNNBase):
            continue
        prefix = f"{path}." if path else ""
        own = [weights.get(prefix + name) for name in layer._flat_weights_names]
        if any(item is None or not item.is_cuda for item in own):
            continue
        before = layer._flat_weights
        try:
            layer._flat_weights = own
            layer.flatten_parameters()
        finally:
            layer._flat_weights = before


@contextlib.contextmanager
def lstms_traced_whole() -> Iterator[None]:
    """Within, the shapes of a traced LSTM's results are known without tracing its time steps, seconds for 50.

    What runs on real tensors is as it was.
    """
    operation = torch.ops.aten.lstm.input
    before = dict(operation.py_kernels)
    operation.py_kernels.update({key: _shaped(kernel) for key, kernel in before.items()})
    operation._dispatch_cache.clear()
    try:
        yield
    finally:
        operation.py_kernels.update(before)
        operation._dispatch_cache.clear()


def _shaped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(given: Tensor, state: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
        if not isinstance(given, FakeTensor):
            found: tuple[Tensor, ...] = kernel(given, state, *rest)
            return found
        both_ways, batch_first = rest[-2:]
        width = state[0].shape[-1] * (2 if both_ways else 1)
        first, second = given.shape[:2]
        made = given.new_empty((second, first, width) if batch_first else (first, second, width))
        # It lies in memory step by step.
        output = made.transpose(0, 1) if batch_first else made
        return output, torch.empty_like(state[0]), torch.empty_like(state[1])

    return lstm


def function_classes() -> list[type[Any]]:
    """Every subclass of autograd.Function that has a forward and is not part of torch's own machinery."""
    found, waiting = [], list(torch.autograd.Function.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if "forward" in vars(cls) and not cls.__module__.startswith(("torch._", "torch.export")):
            found.append(cls)
    return found


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = flatten((args, kwargs))[0]
        given = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                address = storage.data_ptr()
                if address in given or not storage.nbytes() or address in self._known:
                    continue
                self._known.add(address)
                self._now += storage.nbytes()
                weakref.finalize(leaf, self._free, address, storage.nbytes())
        self.most = max(self.most, self._now)
        return result

    def _free(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self._now -= nbytes


def temporary_bytes(function: Callable[[], Any]) -> int:
    """Most bytes that the function has at once in tensors that it makes; for a CPU, whose allocator keeps no
    count."""
    mode = _LiveBytes()
    with mode:
        function()
    return mode.most

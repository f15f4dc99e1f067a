"""What a captured model computes, as plain values that another process, plan or version of torch has the same of.

Two models of equal names and shapes may compute different things: another activation function, another dropout
rate, another base of rotary positions. Their weights fit into each other, and training goes wrong without a word.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.records.training_record import ConstantTensor, ModuleOperations, Structure
from bapipe.torch.capturing.captured import Captured
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import given_arguments, module_path, op_name, size_at, unflatten

__all__ = ["structure_of"]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_TWO_BATCHES = (7, 11)
"""a size that depends on the batch is told by what it is for so many samples"""
_CHUNK = 2**20
_LARGE = 1e30
_BACKEND = frozenset(("cudnn_enabled", "cudnn_enable", "benchmark", "deterministic", "allow_tf32"))
"""arguments that a trace takes from torch's settings on the machine: they choose among kernels"""
_GOLDEN = 0.6180339887498949


def structure_of(captured: Captured) -> Structure:
    """The model's structure. Linear in the operations, and in the elements of constants.

    The same for every partition, number of samples in the example where that is free, device, floating dtype and
    process. Left out are names of intermediate values, shapes of activations, and whatever only asserts. What a
    module that is kept whole computes is told by its class and its printed options.
    """
    describing = _StructureWalk(captured.program, captured.module)
    describing.graph(captured.program.graph)
    rows = json.dumps([describing.rows, _nesting(captured.program)], sort_keys=True)
    return Structure(
        sha256=hashlib.sha256(rows.encode()).hexdigest(),
        modules=tuple(
            ModuleOperations(path=path, operations=tuple(operations))
            for path, operations in describing.modules.items()
        ),
        constants={name: _summed(tensor) for name, tensor in describing.constants.items()},
    )


def _nesting(program: Program) -> Any:
    """How the model returns its results, by their numbers."""

    def plain(tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            return [plain(item) for item in tree]
        if isinstance(tree, Mapping):
            return {str(key): plain(item) for key, item in tree.items()}
        return tree if isinstance(tree, int) else type(tree).__name__

    return plain(unflatten(range(len(program.outputs)), program.out_spec))


class _StructureWalk:
    """Goes through a graph; values are numbered as they are made."""

    def __init__(self, program: Program, module: nn.Module) -> None:
        self.rows: list[Any] = []
        self.modules: dict[str, list[str]] = {}
        self.constants: dict[str, Tensor] = {}
        self._program, self._module = program, module
        self._saved = module.state_dict().keys()
        self._numbers: dict[fx.Node, Any] = {}

    def graph(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and not _is_size(node):
                self._operation(node)
        self.rows.append(["output", _plain(list(self._program.outputs), self._number)])

    def _operation(self, node: fx.Node) -> None:
        call = self._program.calls.get(node)
        if call is not None:
            whole = _ADDRESS.sub("", repr(self._module.get_submodule(call.path)))
            row = ["whole module", call.path, whole, _plain(list(node.args[:1]), self._number)]
            self._add(node, row, call.path, " ".join(whole.split()))
            return
        name, given = op_name(node.target), _given(node)
        row = [name, {key: _plain(value, self._number) for key, value in given.items()}]
        constants = [f"{key}={_shown(value)}" for key, value in given.items() if not _is_tensors(value)]
        regions = [item for value in given.values() if (item := self._region(value)) is not None]
        text = f"{name}({', '.join(constants)})" if constants else name
        self._add(node, row, module_path(node), text)
        for region in regions:
            inner = _region_rows(region)
            self.rows.append(["region", inner])
            self.modules.setdefault(module_path(node), []).extend(row[0] for row in inner if row[0] != "output")

    def _add(self, node: fx.Node, row: list[Any], path: str, text: str) -> None:
        self.rows.append(row)
        self._numbers[node] = len(self._numbers)
        self.modules.setdefault(path, []).append(text)

    def _region(self, value: Any) -> fx.GraphModule | None:
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        found = getattr(self._program.owner, str(value.target), None)
        return found if isinstance(found, fx.GraphModule) else None

    def _number(self, node: fx.Node) -> Any:
        """What stands for a value: a parameter's name, or a number in the order of use."""
        if node not in self._numbers:
            self._numbers[node] = self._described(node)
        return self._numbers[node]

    def _described(self, node: fx.Node) -> Any:
        program = self._program
        kind = program.kinds.get(node, node.op)
        if node in program.state:
            name = program.state[node]
            if kind == "buffer" and name not in self._saved:
                self.constants[name] = self._module.get_buffer(name)
            return [kind, name]
        if kind == "input":
            return [kind, program.inputs.index(node)]
        if node in program.constants:
            known = {id(tensor): name for name, tensor in self.constants.items()}
            tensor = program.constants[node]
            name = known.get(id(tensor), f"constant {len(self.constants)}")
            self.constants[name] = tensor
            return [kind, name]
        return [kind]


def _given(node: fx.Node) -> dict[str, Any]:
    return {name: value for name, value in given_arguments(node).items() if name not in _BACKEND}


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))


def _is_tensors(value: Any) -> bool:
    """Whether an argument is no constant: a tensor, a list of them, or a region."""
    if isinstance(value, fx.Node):
        return not _is_size(value)
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_tensors, value))


def _plain(value: Any, number: Callable[[fx.Node], Any]) -> Any:
    """An argument as plain values; `number` says what stands for a node."""
    if isinstance(value, fx.Node):
        return _size(value.meta["val"]) if _is_size(value) else {"value": number(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, number) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, number) for key, item in value.items()}
    if isinstance(value, slice):
        return ["slice", *(_plain(item, number) for item in (value.start, value.stop, value.step))]
    return _constant(value)


def _constant(value: Any) -> str:
    if isinstance(value, torch.dtype):
        # Which one is the precision's to say.
        return "floating" if value.is_floating_point else str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        return _size(value)
    if isinstance(value, (int, float, complex, str, type(None), torch.layout, torch.memory_format)):
        return repr(value)
    return f"a {type(value).__name__}"


def _size(value: Any) -> str:
    if not isinstance(value, torch.SymInt):
        return "depends on the batch"
    found = [size_at(value, batch) for batch in _TWO_BATCHES]
    if found == list(_TWO_BATCHES):
        return "batch"
    return str(found[0]) if found[0] == found[1] else f"{found[0]} of batch {_TWO_BATCHES[0]}"


def _shown(value: Any) -> str:
    """As `_plain`, for people."""
    if isinstance(value, fx.Node):
        return _size(value.meta["val"]) if _is_size(value) else "_"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(_plain(value, lambda _: "_"))


def _region_rows(region: fx.GraphModule) -> list[Any]:
    """The operations of a region (no_grad, autocast), with values by their places."""
    numbers: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in region.graph.nodes:
        if node.op == "call_function" and not _is_size(node):
            given = _given(node)
            row = [op_name(node.target), {key: _plain(value, numbers.__getitem__) for key, value in given.items()}]
            rows.append(row)
            for value in given.values():
                inner = getattr(region, str(value.target), None) if isinstance(value, fx.Node) else None
                if isinstance(inner, fx.GraphModule):
                    rows.extend(_region_rows(inner))
        elif node.op == "output":
            rows.append(["output", _plain(list(node.args), numbers.__getitem__)])
        if not _is_size(node):
            numbers[node] = len(numbers)
    return rows


def _summed(tensor: Tensor) -> ConstantTensor:
    """What `ConstantTensor` keeps; infinities, as in masks, count as large numbers."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return ConstantTensor(shape=shape, dtype=dtype, sums=())
    totals = [0.0, 0.0, 0.0]
    flat = tensor.detach().flatten()
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        values = chunk.abs() if chunk.is_complex() else chunk
        values = values.to("cpu", torch.float64).nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0)
        values = values.clamp(-_LARGE, _LARGE)
        places = torch.arange(len(values), dtype=torch.float64) + start
        weights = (places * _GOLDEN).frac()
        for index, part in enumerate((values.abs(), values, values * weights)):
            totals[index] += float(part.sum())
    return ConstantTensor(shape=shape, dtype=dtype, sums=tuple(totals))

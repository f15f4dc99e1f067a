"""The one reader of ONNX files: nodes, the shapes of what passes between them, and sizes of the weights.

Only shapes are looked at; values of weights are not, so that files whose weights lie elsewhere are read, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapipe.errors import BaPipeError, FileFormatError, first_line, nearest

__all__ = ["OnnxGraph", "OnnxNode", "OnnxValue", "read_onnx"]

_STANDARD = ("", "ai.onnx")
_BRANCHES = ("If", "Loop", "Scan", "SequenceMap")
_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul",
              "ConvInteger", "MatMulInteger")  # fmt: skip
_SMALL = 1024
"""elements of constants whose values are kept, as shapes follow from them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxValue:
    """What passes between nodes."""

    shape: tuple[int, ...]
    floating: bool
    width: int
    """bytes of an element"""

    @property
    def elements(self) -> float:
        """As layer tables count: numbers of any floating type are 1, all else counts in units of 4 bytes."""
        return math.prod(self.shape) * (1.0 if self.floating else self.width / 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """One operator of the standard's own."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    """"" where an optional one is left out"""
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    module: str = ""
    """path of the module that it was exported from, where the file tells it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """A graph whose every shape is known."""

    name: str
    nodes: tuple[OnnxNode, ...]
    """in the order of the file, in which each follows those that it reads"""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    """values that the file holds"""
    parameters: dict[str, int]
    """of the constants, those that are trained: floating-point initializers of several elements, but for masks"""
    values: dict[str, OnnxValue]
    batch: int
    """samples that the shapes are for: the first dimension of the first input"""


def read_onnx(path: str | Path, *, dimensions: Mapping[str, int] | None = None) -> OnnxGraph:
    """The graph of a file with its free dimensions set.

    A dimension is named as in the file, or INPUT.NUMBER. The first one of the first input is the batch: 1, where
    it is free and not given.
    """
    onnx = _onnx()
    if Path(path).is_dir():
        raise FileFormatError(f"{path} is a folder; name a file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise FileFormatError(f"there is no file {str(path)[:200]}; check the path") from None
    except Exception as error:
        raise FileFormatError(
            f"{str(path)[:200]} cannot be read as an ONNX model: {first_line(error)}; is it the right file?"
        ) from error
    if not model.graph.node:
        raise FileFormatError(f"{str(path)[:200]} has no nodes; is it an ONNX model?")
    if model.functions:
        model = _inlined(onnx, model, path)
    for node in model.graph.node:
        _check(node, path)
    batch = _set_dimensions(model.graph, dict(dimensions or {}), path)
    sizes = _drop_large_values(onnx, model.graph)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=True)
    except Exception as error:
        raise FileFormatError(
            f"{path}: shapes do not follow from those of the inputs: {first_line(error)}; export the model again, "
            "or correct --dim"
        ) from error
    return _graph(onnx, inferred.graph, sizes, batch=batch, path=path)


def _onnx() -> Any:
    try:
        import onnx
        import onnx.inliner
        import onnx.shape_inference
    except ImportError as error:
        raise BaPipeError("reading ONNX files needs onnx, which is missing; pip install onnx") from error
    return onnx


def _inlined(onnx: Any, model: Any, path: str | Path) -> Any:
    """Functions of the file's own, replaced by their nodes."""
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:
        raise FileFormatError(
            f"{path}: its functions cannot be expanded: {first_line(error)}; export the model again"
        ) from error


def _check(node: Any, path: str | Path) -> None:
    what = f"{path}: node '{node.name[:60]}' is {node.op_type[:60]}"
    if node.domain not in _STANDARD:
        raise BaPipeError(
            f"{what} of {node.domain[:60]}, whose work is not known; export the model without optimising it for "
            "a runtime"
        )
    if node.op_type in _BRANCHES:
        raise BaPipeError(
            f"{what}, whose work depends on values; export the model without it, or write a layer table by hand"
        )
    if node.op_type in _QUANTIZED:
        raise BaPipeError(f"{what}, of a quantised model; export the one that is trained, in floating point")


def _set_dimensions(graph: Any, given: dict[str, int], path: str | Path) -> int:
    """Fill in the free dimensions of the inputs, and return the batch."""
    wrong = next((name for name, size in given.items() if size < 1), None)
    if wrong is not None:
        raise BaPipeError(f"--dim {wrong[:40]} must be at least 1, got {given[wrong]}; correct it")
    held = {item.name for item in graph.initializer}
    inputs = [item for item in graph.input if item.name not in held]
    known: dict[str, int] = {}
    free: dict[str, Any] = {}
    for item in inputs:
        if not item.type.HasField("tensor_type"):
            raise BaPipeError(
                f"{path}: input '{item.name[:60]}' is no tensor; export the model with tensors alone"
            )
        for place, dimension in enumerate(item.type.tensor_type.shape.dim):
            if dimension.HasField("dim_value") and dimension.dim_value > 0:
                continue
            own = f"{item.name}.{place}"
            free[own] = dimension
            name = dimension.dim_param or own
            size = given.get(own, given.get(name))
            if size is None and item is inputs[0] and place == 0:
                size = 1
            if size is not None:
                known.setdefault(name, size)
    unknown = next((name for name in given if name not in free and name not in known), None)
    if unknown is not None:
        names = sorted({dimension.dim_param or own for own, dimension in free.items()})
        listed = f"free are {', '.join(names)[:200]}" if names else "none of its dimensions is free"
        raise BaPipeError(f"{path} has no free dimension '{unknown[:60]}'{nearest(unknown, names)}; {listed}")
    for own, dimension in free.items():
        name = dimension.dim_param or own
        size = given.get(own, known.get(name))
        if size is None:
            where, _, number = own.rpartition(".")
            raise BaPipeError(
                f"{path}: dimension {number} of input '{where[:60]}' is free; give it, as --dim {name[:60]}=128"
            )
        dimension.dim_value = size
    _substitute([*graph.value_info, *graph.output], known)
    first = inputs[0].type.tensor_type.shape.dim if inputs else ()
    return int(first[0].dim_value) if first else 1


def _substitute(values: Iterable[Any], known: Mapping[str, int]) -> None:
    """Put sizes into shapes that the file states; one that has other names is left to be inferred."""
    for item in values:
        dimensions = item.type.tensor_type.shape.dim
        if all(one.HasField("dim_value") or one.dim_param in known for one in dimensions):
            for one in dimensions:
                if not one.HasField("dim_value"):
                    one.dim_value = known[one.dim_param]
        elif item.type.HasField("tensor_type"):
            item.type.tensor_type.ClearField("shape")


def _drop_large_values(onnx: Any, graph: Any) -> dict[str, int]:
    """Forget the values of large weights, which no shape follows from; return elements of what may be trained."""
    sizes: dict[str, int] = {}
    floating = _floating(onnx)
    for item in graph.initializer:
        count = math.prod(item.dims)
        if item.data_type in floating and count > 1:
            sizes[item.name] = count
        if count > _SMALL:
            for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "external_data"):
                item.ClearField(field)
    return sizes


def _floating(onnx: Any) -> frozenset[int]:
    kinds = onnx.TensorProto
    return frozenset({kinds.FLOAT, kinds.FLOAT16, kinds.BFLOAT16, kinds.DOUBLE})


def _width(onnx: Any, kind: int) -> int:
    if kind == onnx.TensorProto.STRING:
        return 8
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


def _masks(nodes: Sequence[OnnxNode], constants: Collection[str]) -> set[str]:
    """Constants that are added to what a softmax takes."""
    scores = {node.inputs[0] for node in nodes if node.kind == "Softmax"}
    added = [node for node in nodes if node.kind == "Add" and node.outputs[0] in scores]
    return {name for node in added for name in node.inputs if name in constants}


def _module(node: Any) -> str:
    """As torch's exporter notes it, or, in older files, as the node's name begins."""
    for item in node.metadata_props:
        if item.key == "pkg.torch.onnx.name_scopes":
            scopes = re.findall(r"'([^']*)'", item.value)
            return scopes[-2] if len(scopes) > 1 else ""
    return ".".join(node.name.strip("/").split("/")[:-1])


def _graph(onnx: Any, graph: Any, sizes: dict[str, int], *, batch: int, path: str | Path) -> OnnxGraph:
    floating = _floating(onnx)
    values: dict[str, OnnxValue] = {}
    for item in graph.initializer:
        values[item.name] = OnnxValue(
            shape=tuple(item.dims), floating=item.data_type in floating, width=_width(onnx, item.data_type)
        )
    for item in (*graph.input, *graph.value_info, *graph.output):
        tensor = item.type.tensor_type
        if item.name in values or not tensor.HasField("shape"):
            continue
        if all(one.HasField("dim_value") for one in tensor.shape.dim):
            values[item.name] = OnnxValue(
                shape=tuple(one.dim_value for one in tensor.shape.dim),
                floating=tensor.elem_type in floating,
                width=_width(onnx, tensor.elem_type),
            )
    nodes = []
    constants = {item.name for item in graph.initializer}
    read = {name for node in graph.node for name in node.input} | {item.name for item in graph.output}
    for index, node in enumerate(graph.node):
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        made = OnnxNode(
            kind=node.op_type,
            name=node.name or f"{node.op_type}-{index}",
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attributes=attributes,
            module=_module(node),
        )
        nodes.append(made)
        if node.op_type == "Constant":
            constants.update(node.output)
        unknown = next((name for name in made.outputs if name in read and name not in values), None)
        if unknown is not None:
            raise BaPipeError(
                f"{path}: the shape of '{unknown[:60]}', made by {made.kind} '{made.name[:60]}', does not follow "
                "from those of the inputs; export the model with fixed shapes, or simplify it first"
            )
    for name in _masks(nodes, constants):
        sizes.pop(name, None)
    return OnnxGraph(
        name=graph.name or Path(path).stem,
        nodes=tuple(nodes),
        inputs=tuple(item.name for item in graph.input if item.name not in constants),
        outputs=tuple(item.name for item in graph.output),
        constants=frozenset(constants),
        parameters=sizes,
        values=values,
        batch=batch,
    )

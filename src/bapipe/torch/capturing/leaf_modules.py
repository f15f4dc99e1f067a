"""Modules kept whole: one custom operator in the trace, restored as a call of the module itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bapipe.torch.capturing.torch_internals import TreeSpec, depends_on_data, flatten, is_symbolic, unflatten
from bapipe.torch.capturing.trace_hazards import Finding, Hazard, LayerdropOff, unwatched

__all__ = ["OPAQUE_OP", "OpaqueCall", "Recorded", "call_of", "leaves_traced_whole", "record_outputs"]

Shapes = list[Any]
"""per leaf of an output: (shape, dtype) of a tensor, or ('constant', value)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one call of a module returned in eager runs of two batch sizes."""

    first: Shapes
    second: Shapes
    spec: TreeSpec
    sizes: tuple[int, int]


@dataclass(slots=True, kw_only=True, eq=False)
class OpaqueCall:
    """One call of a module kept whole."""

    path: str
    in_spec: TreeSpec
    leaves: list[Any]
    """inputs; tensors are left out"""
    finding: Finding
    out_spec: TreeSpec | None = None
    out_leaves: list[Any] = field(default_factory=list)
    """outputs; tensors are left out"""
    drops_layers: bool = True
    """whether layer drop may draw in it; what did not in training does not later"""

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        waiting = iter(tensors)
        leaves = [next(waiting) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.in_spec)
        return args, kwargs

    def run(self, module: nn.Module, tensors: Sequence[Any]) -> list[Tensor]:
        """Call the module itself: what stands in a stage for the traced node. Layer drop is off in it too."""
        if not (module.training and self.drops_layers):
            return self._outputs(module, tensors)
        with LayerdropOff() as layerdrop:  # which every function of torch is asked about: not for ever
            outputs = self._outputs(module, tensors)
        self.drops_layers = layerdrop.draws > 0
        return outputs

    def _outputs(self, module: nn.Module, tensors: Sequence[Any]) -> list[Tensor]:
        args, kwargs = self.arguments(tensors)
        if self.finding.checkpoint is not None:
            result = checkpoint(module, *args, **dict(self.finding.checkpoint), **kwargs)
        else:
            result = module(*args, **kwargs)
        return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]

    def __deepcopy__(self, memo: Any) -> OpaqueCall:
        return self


class _Tensor:
    """Stands for a tensor among leaves."""


_TENSOR = _Tensor()
_calls: dict[str, tuple[OpaqueCall, Callable[..., Any], Recorded | None]] = {}


@torch.library.custom_op("bapipe::opaque", mutates_args=())
def _opaque(tensors: list[Tensor], key: str) -> list[Tensor]:  # noqa: ARG001
    raise RuntimeError(f"{key} is only ever traced")


@_opaque.register_fake
def _opaque_fake(tensors: list[Tensor], key: str) -> list[Tensor]:
    call, forward, recorded = _calls[key]
    if recorded is not None:
        results, spec = _from_record(recorded, tensors), recorded.spec
    else:
        args, kwargs = call.arguments(tensors)
        with unwatched(), torch.no_grad():
            leaves, spec = flatten(forward(*args, **kwargs))
            results = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    call.out_spec = spec
    call.out_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in results]
    return [leaf for leaf in results if isinstance(leaf, Tensor)]


OPAQUE_OP = "bapipe.opaque"


def call_of(key: str) -> OpaqueCall:
    """The call that a traced node with this key stands for; only while `leaves_traced_whole` is open."""
    return _calls[key][0]


def _from_record(recorded: Recorded, tensors: Sequence[Tensor]) -> list[Any]:
    """Outputs of the recorded shapes; a size that moved with the batch moves with the symbol."""
    samples = next((size for tensor in tensors for size in tensor.shape if is_symbolic(size)), None)
    (low, high), device = recorded.sizes, tensors[0].device if tensors else torch.device("cpu")
    results = []
    for one, two in zip(recorded.first, recorded.second, strict=True):
        if one[0] == "constant":
            results.append(one[1])
            continue
        shape = []
        for a, b in zip(one[0], two[0], strict=True):
            slope = (b - a) // (high - low)
            shape.append(a if b == a or samples is None else slope * samples + (a - slope * low))
        results.append(torch.empty(shape, dtype=one[1], device=device))
    return results


@contextlib.contextmanager
def leaves_traced_whole(
    module: nn.Module, findings: Sequence[Finding], recorded: dict[str, list[Recorded]]
) -> Iterator[None]:
    """While open, the named modules trace as one operator each."""
    originals: list[tuple[nn.Module, Any]] = []
    _calls.clear()
    try:
        for finding in findings:
            leaf = module.get_submodule(finding.path)
            originals.append((leaf, vars(leaf).get("forward")))
            forward = leaf.forward
            leaf.forward = _traced_whole(finding, forward, recorded.get(finding.path, []))
        yield
    finally:
        _calls.clear()
        for leaf, own in reversed(originals):
            if own is None:
                del leaf.forward
            else:
                leaf.forward = own


def _traced_whole(finding: Finding, forward: Callable[..., Any], recorded: list[Recorded]) -> Callable[..., Any]:
    count = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        leaves, spec = flatten((args, kwargs))
        if any(map(depends_on_data, leaves)):
            # Its own trace would need the number; the module that reads it from a tensor is the one to keep whole.
            raise Hazard("a number read from a tensor decides what is computed")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = f"{finding.path}#{count}"
        call = OpaqueCall(path=finding.path, in_spec=spec, leaves=rest, finding=finding)
        _calls[key] = (call, forward, recorded[count] if count < len(recorded) else None)
        count += 1
        outputs = iter(_opaque(tensors, key))
        assert call.out_spec is not None
        return unflatten([next(outputs) if leaf is _TENSOR else leaf for leaf in call.out_leaves], call.out_spec)

    return run


def record_outputs(
    module: nn.Module, paths: Sequence[str], runs: Sequence[Callable[[], Any]], sizes: tuple[int, int]
) -> dict[str, list[Recorded]]:
    """Run the model eagerly at two batch sizes and note what the named modules return, call by call."""
    seen: list[dict[str, list[tuple[Shapes, TreeSpec]]]] = []
    for run in runs:
        calls: dict[str, list[tuple[Shapes, TreeSpec]]] = {path: [] for path in paths}
        handles = [module.get_submodule(path).register_forward_hook(_recorder(calls[path])) for path in paths]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        seen.append(calls)
    found: dict[str, list[Recorded]] = {}
    for path in paths:
        pairs = zip(seen[0][path], seen[-1][path], strict=False)
        found[path] = [Recorded(first=a[0], second=b[0], spec=a[1], sizes=sizes) for a, b in pairs]
    return found


def _recorder(into: list[tuple[Shapes, TreeSpec]]) -> Callable[..., None]:
    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        leaves, spec = flatten(output)
        shapes: Shapes = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else ("constant", leaf) for leaf in leaves
        ]
        into.append((shapes, spec))

    return note

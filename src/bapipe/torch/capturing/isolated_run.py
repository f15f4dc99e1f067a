"""Run a captured model from isolated stages in one process: the proof that the cuts change nothing."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.module_state import preserved
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.capturing.stage_module import Stage
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.capturing.trace_hazards import LayerdropOff

if TYPE_CHECKING:
    from bapipe.torch.capturing.captured import Captured

__all__ = ["Result", "largest_difference", "run_eager", "run_stages", "scalar_of"]

Scalar = Callable[[Any], Tensor]
_BLOCK = 2**18
"""elements compared at a time: their double precision stays in a cache"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One forward and backward."""

    output: tuple[Tensor, ...]
    """tensors that the model returns, taken out of whatever they came in"""
    loss: Tensor
    gradients: dict[str, Tensor]
    """by parameter; those without one are left out"""
    buffers: dict[str, Tensor]
    """after the forward"""

    def on_host(self) -> Result:
        """The same in the host's memory."""
        return Result(
            output=tuple(value.cpu() for value in self.output),
            loss=self.loss.cpu(),
            gradients={name: value.cpu() for name, value in self.gradients.items()},
            buffers={name: value.cpu() for name, value in self.buffers.items()},
        )


def scalar_of(output: Any) -> Tensor:
    """One number to differentiate: the first scalar float in the output, else a fixed mix of all floats."""
    floats = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not floats:
        raise BaPipeError(
            "nothing in the model's output has a gradient; capture a model with trainable parameters"
        )
    for leaf in floats:
        if leaf.ndim == 0:
            return leaf
    total: Tensor | None = None
    for leaf in floats:
        weights = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device).cos()
        part = (leaf.reshape(-1) * weights.to(leaf.real.dtype if leaf.is_complex() else leaf.dtype)).real.mean()
        total = part if total is None else total + part.to(total.dtype)
    assert total is not None
    return total


def run_eager(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    loss: Scalar = scalar_of,
) -> Result:
    """The module as it is, in training mode; layer drop is off, as in a capture. The module is left as it was."""
    with preserved(module), LayerdropOff():
        torch.manual_seed(seed)
        output = module(*_own(args), **_own(kwargs or {}))
        scalar = loss(output)
        scalar.backward()  # type: ignore[no-untyped-call]
        return _result(output, scalar, [module])


def _own(tree: Any) -> Any:
    """Copies, so that a model that writes its inputs does not change the caller's."""
    if isinstance(tree, Tensor):
        return tree.detach().clone().requires_grad_(tree.requires_grad)
    if isinstance(tree, dict):
        return {key: _own(item) for key, item in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_own(item) for item in tree)
    return tree


def _result(output: Any, scalar: Tensor, modules: Sequence[nn.Module]) -> Result:
    """What the modules hold after a backward. Gradients are not copied: `preserved` puts others in place."""
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            known = gradients.get(name)
            gradients[name] = parameter.grad if known is None else known + parameter.grad
        for name, buffer in module.named_buffers():
            buffers[name] = buffer.detach().clone()
    detached = tuple(leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, Tensor))
    return Result(output=detached, loss=scalar.detach(), gradients=gradients, buffers=buffers)


def run_stages(
    captured: Captured,
    cuts: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    position: Position | None = None,
    isolate: bool = False,
    loss: Scalar = scalar_of,
    device: torch.device | None = None,
) -> Result:
    """Forward and backward through stages that see only what crosses their cuts.

    `cuts` are the layers at which a new stage begins. Values cross as detached, contiguous copies, errors
    likewise; what comes without a gradient travels back as zeros. With `position` = (step, micro-batch) random
    nodes are seeded one by one, else the generator runs on from `seed` as it would in eager. With `isolate` every
    stage has copies of its parameters and gradients of tied ones are summed; costs their memory. `device` is where
    module and inputs are, if not on the CPU.
    """
    bounds = [0, *cuts, len(captured.layers)]
    if any(low >= high for low, high in itertools.pairwise(bounds)):
        raise BaPipeError(
            f"cuts must increase from 1 to {len(captured.layers) - 1}, got {list(cuts)}; "
            "name layers that begin a stage"
        )
    stages = [captured.stage(low, high - 1, device=device) for low, high in itertools.pairwise(bounds)]
    if device is not None:
        stages = [stage.to(device) for stage in stages]
    if isolate:
        stages = [copy.deepcopy(stage) for stage in stages]
    leaves = captured.input_leaves(_own(tuple(args)), _own(kwargs or {}))
    with preserved(captured.module):
        torch.manual_seed(seed)
        output, scalar = _forward_backward(captured, stages, leaves, position, loss)
        result = _result(output, scalar, stages)
    own = {name for name, _ in captured.module.named_buffers()}
    buffers = {name: buffer for name, buffer in result.buffers.items() if name in own}
    return Result(output=result.output, loss=result.loss, gradients=result.gradients, buffers=buffers)


def _forward_backward(
    captured: Captured, stages: Sequence[Stage], leaves: Sequence[Any], position: Position | None, loss: Scalar
) -> tuple[Any, Tensor]:
    taken: list[tuple[list[Tensor], list[Any]]] = []
    values: list[Tensor] = []
    for stage in stages:
        spec = stage.stage_spec
        stage.rng_position = position
        received = [
            _transfer(value, about.requires_grad) for value, about in zip(values, spec.received, strict=True)
        ]
        sent = list(stage(*received, *(leaves[root.index] for root in spec.roots)))
        taken.append((received, sent))
        values = sent
    output = captured.output(taken[-1][1])
    scalar = loss(output)
    errors: list[Tensor | None] = []
    for index in range(len(stages) - 1, -1, -1):
        received, sent = taken.pop()  # and its memory goes back once its backward is done
        if index == len(stages) - 1:
            scalar.backward()  # type: ignore[no-untyped-call]
        else:
            pairs = [(value, error) for value, error in zip(sent, errors, strict=True) if value.requires_grad]
            wanted = [(value, torch.zeros_like(value) if error is None else error) for value, error in pairs]
            if wanted:
                torch.autograd.backward([value for value, _ in wanted], [error for _, error in wanted])
        errors = [value.grad for value in received]
    return output, scalar


def _transfer(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(requires_grad)


def largest_difference(found: Result, expected: Result) -> tuple[float, str]:
    """The largest relative difference of loss, outputs, gradients and buffers, and of what.

    Relative to the largest entry of the tensor; gradients that are noise (under a thousandth of the largest
    gradient) relative to that thousandth. A missing gradient counts as zeros; what is finite on one side only as
    infinitely far off. What was expected may be in the host's memory: it is brought back tensor by tensor.
    """
    worst, what = 0.0, ""

    def compare(name: str, one: Tensor, two: Tensor, floor: float = 0.0) -> None:
        nonlocal worst, what
        difference = _difference(one, two.to(one.device), floor)
        if difference > worst or not what:
            worst, what = difference, name

    compare("the loss", found.loss, expected.loss)
    scale = max((_largest(value) for value in expected.gradients.values() if value.numel()), default=0.0)
    for name in sorted(expected.gradients.keys() | found.gradients.keys()):
        one, two = found.gradients.get(name), expected.gradients.get(name)
        if one is None:
            assert two is not None
            one = torch.zeros_like(two)
        elif two is None:
            two = torch.zeros_like(one)
        compare(f"the gradient of {name}", one, two, scale / 1000)
    for name, value in found.buffers.items():
        compare(f"buffer {name}", value, expected.buffers[name])
    if len(found.output) != len(expected.output):
        return math.inf, f"the number of outputs ({len(found.output)} for {len(expected.output)})"
    for index, (one, two) in enumerate(zip(found.output, expected.output, strict=True)):
        compare(f"output {index}", one, two)
    return worst, what


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; nan where there is one."""
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def _difference(one: Tensor, two: Tensor, floor: float) -> float:
    """Relative to the largest finite entry of `two`, in double precision, a block at a time.

    Wide copies of a whole tensor would take many times its memory, and most of their time to get it.
    """
    if one.shape != two.shape:
        return math.inf
    if not one.numel() or torch.equal(one, two):
        return 0.0
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    gap = size = 0.0
    for left, right in zip(
        torch.split(one.reshape(-1), _BLOCK), torch.split(two.reshape(-1), _BLOCK), strict=True
    ):
        left, right = left.to(wide), right.to(wide)
        same = (left == right) | (left.isnan() & right.isnan())
        own = float(torch.where(same, torch.zeros_like(left), left - right).abs().max())
        if not math.isfinite(own):
            return math.inf
        gap = max(gap, own)
        size = max(size, float(torch.where(right.isfinite(), right, torch.zeros_like(right)).abs().max()))
    return gap / max(size, floor, 1e-300)

"""After every capture: one small batch through eager and through the captured layers, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.export import Examples, error_words
from bapipe.torch.capturing.isolated_run import Result, largest_difference, run_eager, run_stages

if TYPE_CHECKING:
    from bapipe.torch.capturing.captured import Captured

__all__ = ["TOLERANCES", "self_check"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
"""relative; anything coarser: 5e-2"""
_SAMPLES = 2


def self_check(captured: Captured, examples: Examples, device: torch.device | None = None) -> float:
    """Loss, outputs, buffers and every gradient against eager, each layer a stage of its own.

    Returns the largest relative difference. Raises BaPipeError naming layer and tensor where it is over the
    tolerance of the coarsest dtype. Costs two forwards and backwards of at most two samples (of the whole example
    where the batch is not free) and the memory of two sets of gradients, of which a GPU holds one. `device` is
    where the module is, if not the CPU.
    """
    small = examples.resized(min(_SAMPLES, examples.batch)) if captured.dynamic else examples
    if device is not None:
        small = small.on(device)
    args, kwargs = small.tree()
    try:
        expected = run_eager(captured.module, args, kwargs).on_host()
    except BaPipeError:
        raise
    except Exception as error:
        raise BaPipeError(
            f"{type(captured.module).__name__} fails on {small.batch} samples of its own example: "
            f"{error_words(error)}; correct the model or the example inputs"
        ) from error
    try:
        found = run_stages(captured, range(1, len(captured.layers)), args, kwargs, device=device)
    except Exception as error:
        raise BaPipeError(
            f"the layers captured of {type(captured.module).__name__} do not run: {error_words(error)}; "
            "please report this model"
        ) from error
    difference, what = largest_difference(found, expected)
    allowed = max(
        (TOLERANCES.get(item.dtype, 5e-2) for item in captured.module.parameters() if item.is_floating_point()),
        default=TOLERANCES[torch.float32],
    )
    if difference > allowed:
        raise BaPipeError(
            f"what was captured of {type(captured.module).__name__} differs from eager: {what} by "
            f"{difference:.1e} relative, {allowed:.0e} is allowed{_guess(captured, found, expected, allowed)}; "
            "the model does what a trace cannot keep: move it into a submodule of its own, or pass check=False"
        )
    return difference


def _guess(captured: Captured, found: Result, expected: Result, allowed: float) -> str:
    """The last layer with a wrong gradient: what is wrong lies in it or behind it."""
    for layer in reversed(captured.layers):
        for name in layer.parameters:
            one, two = found.gradients.get(name), expected.gradients.get(name)
            if one is None or two is None:
                continue
            if float((one - two.to(one.device)).abs().max()) > allowed * max(float(two.abs().max()), 1e-300):
                return f"; first wrong gradient (from the loss backwards): {name} in layer '{layer.name}'"
    return ""

"""The optimizers that are known without a measurement: what each keeps and needs, in copies of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest

__all__ = ["DEFAULT_OPTIMIZER", "OPTIMIZERS", "OptimizerMemory", "find_optimizer", "same_step"]

DEFAULT_OPTIMIZER = "sgd"
"""where neither a request nor a profile says"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """Memory of one of torch's optimizers, beside weights and gradients."""

    state: float
    """copies of the weights that it keeps between steps"""
    workspace: float
    """copies that its step makes and frees again: Adam has the roots of all second moments at once"""
    steps_like: tuple[str, ...] = ()
    """other optimizers whose step takes as long, so that a time measured with one serves the other"""


OPTIMIZERS = {
    "sgd": OptimizerMemory(state=0, workspace=0),
    "momentum": OptimizerMemory(state=1, workspace=0),
    "adam": OptimizerMemory(state=2, workspace=1, steps_like=("adamw",)),
    "adamw": OptimizerMemory(state=2, workspace=1, steps_like=("adam",)),
}
"""by the name that plans and profiles have for it"""


def find_optimizer(name: str) -> OptimizerMemory:
    """The optimizer of that name; an unknown one is refused."""
    if name not in OPTIMIZERS:
        raise BaPipeError(
            f"unknown optimizer '{name[:60]}'{nearest(name, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}; another "
            "is planned from a profile that was measured with it (--optimizer package.module:Class)"
        )
    return OPTIMIZERS[name]


def same_step(name: str) -> tuple[str, ...]:
    """Other optimizers whose step takes as long as this one's."""
    return OPTIMIZERS[name].steps_like if name in OPTIMIZERS else ()

"""The optimizers that are known without a measurement: what each keeps and needs, in copies of the weights.

An optimizer is a text everywhere: a name or a class, and its options in brackets, such as `adamw(fused=true)` or
`torch.optim:RMSprop(momentum=0.9)`. `master_weights=true` among them is BaPipe's own: the optimizer keeps fp32
copies of weights of 16 bits, and its state in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.precision import MASTER_BYTES, Precision
from bapipe.models.builtin import Argument
from bapipe.models.model_spec import parse_arguments

__all__ = [
    "DEFAULT_OPTIMIZER",
    "OPTIMIZERS",
    "OptimizerMemory",
    "OptimizerSpec",
    "find_optimizer",
    "is_elementwise",
    "optimizer_text",
    "parse_optimizer",
    "same_step",
]

DEFAULT_OPTIMIZER = "sgd"
"""where neither a request nor a profile says"""
_MASTERS = "master_weights"
_SPEC = re.compile(r"([^()]+)(?:\(([^()]*)\))?")


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


_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""classes of torch.optim that change an element by its own gradient and state alone"""
_WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""those that look at all of a weight"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What an optimizer's text says."""

    name: str
    """of the table, or package.module:Class"""
    options: Mapping[str, Argument] = field(default_factory=dict)
    """of its class, beside the learning rate"""
    master_weights: bool = False
    """whether it keeps fp32 copies of weights of 16 bits"""

    def __str__(self) -> str:
        options = {**self.options, **({_MASTERS: True} if self.master_weights else {})}
        listed = ",".join(f"{key}={_shown(value)}" for key, value in sorted(options.items()))
        return f"{self.name}({listed})" if listed else self.name

    def require_for(self, precision: Precision) -> None:
        """Refuse master weights where the weights are fp32 already."""
        if self.master_weights and not precision.takes_masters:
            raise BaPipeError(
                f"--master-weights keeps fp32 copies of weights of 16 bits, and those of {precision.word} are "
                f"{precision.weights}; leave it out, or give --precision bf16"
            )


def _shown(value: Argument) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_optimizer(text: str) -> OptimizerSpec:
    """`name(key=value,…)` taken apart."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise BaPipeError(f"an optimizer looks like adamw or adamw(fused=true), got '{text[:60]}'; correct it")
    options = parse_arguments([part.strip() for part in (found[2] or "").split(",") if part.strip()])
    masters = options.pop(_MASTERS, False)
    if not isinstance(masters, bool):
        raise BaPipeError(f"{_MASTERS} is true or false, got '{str(masters)[:60]}'; correct it")
    return OptimizerSpec(name=found[1].strip(), options=options, master_weights=masters)


def optimizer_text(name: str | None, arguments: tuple[str, ...], *, master_weights: bool) -> str | None:
    """The text of an optimizer that was given in options of a command; None: none was."""
    if name is None:
        if arguments or master_weights:
            raise BaPipeError("--optimizer-arg and --master-weights belong to an optimizer; give --optimizer too")
        return None
    spec = parse_optimizer(name)
    options = {**spec.options, **parse_arguments(arguments)}
    return str(
        OptimizerSpec(name=spec.name, options=options, master_weights=master_weights or spec.master_weights)
    )


def find_optimizer(text: str, weight_bytes: int = MASTER_BYTES) -> OptimizerMemory:
    """The memory of an optimizer of the table; an unknown one is refused.

    `weight_bytes` are those of one parameter. A fused step has no temporary tensors. With master weights the
    state, a copy of weights and gradients, and all that the step makes are fp32.
    """
    spec = parse_optimizer(text)
    if spec.name not in OPTIMIZERS:
        raise BaPipeError(
            f"unknown optimizer '{spec.name[:60]}'{nearest(spec.name, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}"
            "; another is planned from a profile that was measured with it (--optimizer package.module:Class)"
        )
    memory = OPTIMIZERS[spec.name]
    workspace = 0.0 if spec.options.get("fused") is True else memory.workspace
    if not spec.master_weights:
        return OptimizerMemory(state=memory.state, workspace=workspace, steps_like=memory.steps_like)
    wider = MASTER_BYTES / weight_bytes
    return OptimizerMemory(state=(1 + memory.state) * wider, workspace=(1 + workspace) * wider)


def same_step(text: str) -> tuple[str, ...]:
    """Other optimizers whose step takes as long as this one's, with the same options."""
    spec = parse_optimizer(text)
    others = OPTIMIZERS[spec.name].steps_like if spec.name in OPTIMIZERS else ()
    return tuple(
        str(OptimizerSpec(name=name, options=spec.options, master_weights=spec.master_weights)) for name in others
    )


def is_elementwise(text: str) -> bool | None:
    """Whether the optimizer changes an element of a weight by that element's gradient and state alone, so that any
    part of a weight can be stepped by itself; None: it is a class that is not known here."""
    name = parse_optimizer(text).name
    package, _, kind = name.partition(":")
    if name.lower() in OPTIMIZERS:
        return True
    if package.split(".")[:2] == ["torch", "optim"]:
        return True if kind in _ELEMENTWISE else False if kind in _WHOLE else None
    return None

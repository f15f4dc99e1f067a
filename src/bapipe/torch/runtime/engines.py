"""The engines that can run a plan, and what each can run of it: the one place that says it. Imports no torch.

`bapipe` is the runtime of this package, `torch` that of torch.distributed.pipelining on the same captured stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.exporters.plan_features import Feature, features_of
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Schedule

__all__ = [
    "CAPABILITIES",
    "ENGINES",
    "TORCH_VERSIONS",
    "Capability",
    "check_engine",
    "check_torch_version",
    "refusal",
]

ENGINES = ("bapipe", "torch")
"""as `--engine` takes them"""
TORCH_VERSIONS = ("2.11", "2.12", "2.13")
"""of torch, whose pipelining is known: its runtime is private, and changes from version to version"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something that a plan or a run may need of its engine."""

    name: str
    """as the table calls it"""
    torch: str
    """yes, refused, or from which version of torch on; our own engine runs all of it"""
    instead: str = ""
    """where it is refused: what to do, after `use --engine bapipe`"""


_REFUSED: Mapping[Feature, str] = {
    Feature.REPLICAS: "or plan with --stages",
    Feature.UNEVEN_REPLICAS: "or plan with --stages",
    Feature.RECOMPUTATION: "or plan without activation checkpointing",
    Feature.SHORT_BATCH: "or plan a --global-batch that the micro-batch divides",
}
"""what of a plan torch's engine cannot run, and what to do"""
_ENDLESS = Capability(name="PipeDream's order", torch="refused", instead="or plan with --schedule 1f1b-so")
_COMPILED = Capability(
    name="compiled layers whose backward is in two parts",
    torch="refused",
    instead="or give --no-compile",
)
_LEFT_OUT = frozenset({Feature.INNER_CUTS, Feature.DEVICES})
"""what says nothing of an engine that runs captured stages"""


def _capabilities() -> tuple[Capability, ...]:
    of_plans = [
        Capability(
            name=feature.value,
            torch="refused" if feature in _REFUSED else "yes",
            instead=_REFUSED.get(feature, ""),
        )
        for feature in Feature
        if feature not in _LEFT_OUT
    ]
    return (
        *of_plans,
        Capability(name="backward in two parts (I and W)", torch="yes"),
        _ENDLESS,
        Capability(name="values that skip stages", torch="yes"),
        Capability(name="values across a cut without a gradient, such as integers", torch="2.13"),
        Capability(name="compiled layers", torch="yes"),
        _COMPILED,
        Capability(name="clipping, loss scaling, checkpoints, evaluation, traces", torch="yes"),
        Capability(name="short global batches, and sequences of several lengths", torch="no"),
        Capability(name="few messages held, however many micro-batches", torch="no"),
        Capability(name="a choice of transports", torch="no: gloo between CPUs, NCCL between GPUs"),
    )


CAPABILITIES = _capabilities()
"""rows of the table in the guide"""


def refusal(plan: Plan, schedule: Schedule, engine: str, *, compiled: bool | None = None) -> str | None:
    """Why the engine cannot run the plan, in one line that says what to do; None: it can."""
    if engine == "bapipe":
        return None
    found: list[tuple[str, str]] = []
    if not schedule.flushes:
        found.append((f"{_ENDLESS.name} ({schedule.name})", _ENDLESS.instead))
    else:
        held = features_of(plan)
        found += [(held[feature], instead) for feature, instead in _REFUSED.items() if feature in held]
    if (plan.compiled if compiled is None else compiled) and schedule.parted_stages():
        found.append((_COMPILED.name, _COMPILED.instead))
    if not found:
        return None
    what, instead = found[0]
    return f"torch's engine cannot run this plan: {what}; use --engine bapipe, {instead}"


def check_engine(plan: Plan, schedule: Schedule, engine: str, *, compiled: bool | None = None) -> None:
    """Refuse, before anything starts, an engine that there is not, or that cannot run the plan."""
    if engine not in ENGINES:
        raise BaPipeError(
            f"an engine is one of {', '.join(ENGINES)}, got '{engine[:40]}'{nearest(engine, ENGINES)}"
        )
    reason = refusal(plan, schedule, engine, compiled=compiled)
    if reason is not None:
        raise BaPipeError(reason)


def check_torch_version(engine: str, version: str) -> None:
    """Refuse torch's engine in a torch whose pipelining is not known."""
    if engine == "torch" and ".".join(version.split(".")[:2]) not in TORCH_VERSIONS:
        raise BaPipeError(
            f"--engine torch is for torch {', '.join(TORCH_VERSIONS)}, this is {version[:40]}, whose pipelining "
            "is not known; use --engine bapipe, or install one of these"
        )

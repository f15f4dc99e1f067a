"""What every export says of itself, and small pieces of text that several of them write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapipe.exporters.plan_features import Feature, one_pipeline
from bapipe.exporters.targets import Target
from bapipe.records.plan import Plan
from bapipe.schedule.schedule_file import to_torch_csv

__all__ = ["Export", "Job", "commented", "header_lines", "order_csv", "python_lists", "yaml_rows"]

_NOT_SET = ", which are not set here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a writer is given."""

    plan: Plan
    target: Target
    version: str
    out: str
    """path of the file that is written"""

    @property
    def trains(self) -> bool:
        """Whether what is written trains by itself, and so sets precision and optimizer."""
        return self.target.name == "torch"

    @property
    def csv(self) -> str:
        """Path of the order beside it."""
        return f"{self.out.rpartition('.')[0] or self.out}.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Files for an engine."""

    files: Mapping[str, str]
    """path -> text"""
    losses: Mapping[Feature, str]
    """what the plan holds and the engine cannot"""
    notes: tuple[str, ...] = ()
    """what to do besides"""


def header_lines(job: Job, losses: Mapping[Feature, str], notes: Sequence[str]) -> list[str]:
    """What the file is, what was lost, and what is left to do."""
    plan = job.plan
    kinds = {item.name: item.type for item in plan.cluster.accelerators}
    lines = [
        f"{plan.model.name} for {job.target.title} {job.version}, from a BaPipe plan of {len(plan.stages)} stages "
        f"on {len(plan.ranks)} accelerators",
        f"order {plan.schedule.name}, {plan.microbatches} micro-batches of {plan.microbatch_size}, global batch "
        f"{plan.global_batch}; predicted {plan.prediction.time:.4g} s per step",
        f"planned for precision {plan.dtype} and optimizer {plan.optimizer}{'' if job.trains else _NOT_SET}",
    ]
    if losses:
        lines.append(f"The plan holds, and {job.target.title} cannot:")
        lines += [f"  {feature.value}: {text}" for feature, text in losses.items()]
    else:
        lines.append(f"{job.target.title} can hold all that the plan holds.")
    lines += [f"Note: {note}" for note in notes]
    ranks = [f"  rank {rank}: {name} ({kinds[name]})" for rank, name in enumerate(plan.ranks)]
    lines += ["Accelerators of the plan:", *ranks] if len(ranks) <= 64 else []
    return lines


def commented(lines: Sequence[str]) -> str:
    """The lines as comments of Python, TOML, YAML or a shell."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def order_csv(plan: Plan) -> str | None:
    """The order of one pipeline as torch's CSV; None where replicas are uneven."""
    order = one_pipeline(plan)
    return None if order is None else to_torch_csv(order)


def python_lists(rows: Sequence[Sequence[str]], *, indent: str) -> str:
    """A list of lists of texts, a row per line; Python, TOML and YAML read it alike."""
    inner = "".join(f"{indent}    {json.dumps(list(row))},\n" for row in rows)
    return f"[\n{inner}{indent}]"


def yaml_rows(rows: Sequence[Sequence[str]], *, indent: str) -> str:
    """A list of lists of texts as YAML, a row per line."""
    return "".join(f"{indent}- {json.dumps(list(row))}\n" for row in rows)

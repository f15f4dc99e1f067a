"""A question -> its plan and all that a page shows of it, exactly as `bapipe plan` would plan it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.fpga import explore_fpga, make_fpga_plan
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_toml import cluster_toml
from bapipe.io.files import content_hash, dump_json
from bapipe.planner import Exploration, explore, make_plan
from bapipe.planner.inputs import FPGA_DTYPE, cluster_with, goes_on_fpgas, layers_for_fpgas, profile_for
from bapipe.planner.partition.paper.step_record import Step
from bapipe.records.plan import Plan
from bapipe.reporting.html.document import make_subject, render_report, timelines_of
from bapipe.reporting.html.elements import counted
from bapipe.reporting.html.page_data import page_data
from bapipe.reporting.html.sections import Subject, sections_html
from bapipe.reporting.terminal.plan_table import answer as answer_words
from bapipe.reporting.terminal.plan_table import stage_layers
from bapipe.serve.question import MOST_ACCELERATORS, Question, command_line, query_values
from bapipe.units import format_bytes, format_seconds, format_throughput

__all__ = ["MOST_ACTIONS", "PlannedAnswer", "answer_parts", "draft_question", "plan_question"]

MOST_ACTIONS = 200_000
"""actions from which on a timeline is not sent to a page"""
_NAMES = 160
"""characters of a name from a file that a page shows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """A plan, and what it was made from."""

    plan: Plan
    profile: Profile | None = None
    """None on FPGAs, whose layers have other costs"""
    steps: tuple[Step, ...] = ()


def plan_question(question: Question) -> PlannedAnswer:
    """Plan it. The files that it names are read from the current folder."""
    cluster = _cluster(question)
    if goes_on_fpgas(question.model, cluster):
        dtype = question.precision or FPGA_DTYPE
        found = explore_fpga(layers_for_fpgas(question.model), cluster, question.request, dtype=dtype)
        return PlannedAnswer(plan=make_fpga_plan(found), steps=found.steps)
    best = explore(_profile(question, cluster), cluster, question.request)
    return PlannedAnswer(plan=make_plan(best), profile=best.profile, steps=best.steps)


def draft_question(question: Question) -> PlannedAnswer | None:
    """A plan found fast: data parallelism, or 1f1b with micro-batches of the same size, or of the first small one.

    It fits, but others may be better. None where the whole search is as narrow, or nothing so simple fits.
    """
    cluster, request = _cluster(question), question.request
    forced = request.strategy != "exact" or request.schedule is not None or request.space == "paper"
    if forced or goes_on_fpgas(question.model, cluster):
        return None
    profile = _profile(question, cluster)
    found: list[Exploration] = []
    if request.stages in (None, 1):
        with contextlib.suppress(BaPipeError):
            found.append(explore(profile, cluster, replace(request, strategy="dp")))
    best_size = found[0].best.candidate.chain.microbatch if found else request.microbatch
    for size in (1, 2, 4) if best_size is None else (best_size,):
        with contextlib.suppress(BaPipeError):
            found.append(explore(profile, cluster, replace(request, schedule="1f1b", microbatch=size)))
            break
    if not found:
        return None
    best = max(found, key=lambda each: each.best.throughput)
    return PlannedAnswer(plan=make_plan(best), profile=best.profile, steps=best.steps)


def _cluster(question: Question) -> Cluster:
    cluster = cluster_with(
        question.cluster,
        memory_limit=question.memory_limit,
        link_bandwidth=question.link_bandwidth,
        names=("memory_limit", "link_bandwidth"),
    )
    if len(cluster) > MOST_ACCELERATORS:
        raise BaPipeError(
            f"a page plans at most {MOST_ACCELERATORS} accelerators, the cluster has {len(cluster)}; take fewer, "
            "or use `bapipe plan`"
        )
    return cluster


def _profile(question: Question, cluster: Cluster) -> Profile:
    return profile_for(question.model, cluster, microbatch=question.microbatch, precision=question.precision)


def answer_parts(question: Question, *, draft: bool = False) -> dict[str, str]:
    """What the server hands out, by name: `answer`, JSON for the page, and the files to download.

    A draft has the answer alone, which is null where there is no draft.
    """
    found = draft_question(question) if draft else plan_question(question)
    if found is None:
        return {"answer": "null"}
    plan = found.plan
    subject = make_subject(plan, profile=found.profile, steps=found.steps)
    command = command_line(question)
    parts = {"answer": json.dumps(_answer(question, subject, command, draft=draft), allow_nan=False)}
    if not draft:
        parts["plan.json"] = dump_json(plan)
        parts["cluster.toml"] = cluster_toml(plan.cluster)
        parts["command.sh"] = command + "\n"
        parts["report.html"] = render_report(subject)
    return parts


def _answer(question: Question, subject: Subject, command: str, *, draft: bool) -> dict[str, Any]:
    plan = subject.plan
    count = len(subject.predicted.kinds)
    return {
        "question": query_values(question),
        "draft": draft,
        "hash": content_hash(plan),
        "command": command,
        "words": answer_words(plan).removeprefix(f"{plan.model.name}: "),
        "sections": sections_html(subject),
        "actions": count,
        "data": page_data(timelines_of(subject)) if count <= MOST_ACTIONS else None,
        "figures": _figures(plan),
        "stages": [
            {
                "where": _where(stage.accelerators),
                "layers": stage_layers(stage)[:_NAMES],
                "time": stage.forward + stage.backward,
                "time_words": format_seconds(stage.forward + stage.backward),
                "memory": stage.memory_bytes,
                "memory_words": format_bytes(stage.memory_bytes),
            }
            for stage in plan.stages
        ],
    }


def _where(names: tuple[str, ...]) -> str:
    return names[0][:_NAMES] + (f" … ×{len(names)}" if len(names) > 1 else "")


def _figures(plan: Plan) -> list[dict[str, Any]]:
    """What two plans are compared by; `better` says which way, where either is better."""
    prediction = plan.prediction
    memory = max(stage.memory_bytes for stage in plan.stages)
    numbers: list[tuple[str, str, float, str, str | None]] = [
        ("time", "time per global batch", prediction.time, format_seconds(prediction.time), "less"),
        ("throughput", "samples/s", prediction.throughput, format_throughput(prediction.throughput), "more"),
        ("gap", "over the lower bound", prediction.gap, f"{prediction.gap:.1%}", "less"),
        ("lower_bound", "lower bound", prediction.lower_bound, format_seconds(prediction.lower_bound), None),
        ("bubble", "bubble", prediction.bubble, f"{prediction.bubble:.1%}", "less"),
        ("exposed_communication", "longest wait for transfers", prediction.exposed_communication,
         format_seconds(prediction.exposed_communication), "less"),
        ("memory", "memory of the fullest accelerator", memory, format_bytes(memory), "less"),
    ]  # fmt: skip
    words = [
        ("way", "way", f"{plan.kind}, {plan.schedule.name}"),
        ("stages", "stages", "-".join(str(len(stage.accelerators)) for stage in plan.stages)[:_NAMES]),
        ("batches", "micro-batches", f"{plan.microbatches} of {plan.microbatch_size}"),
        ("global_batch", "global batch", counted(plan.global_batch, "sample")),
    ]
    return [
        *({"key": key, "name": name, "words": text} for key, name, text in words),
        *(
            {"key": key, "name": name, "value": value, "words": text, "better": better}
            for key, name, value, text, better in numbers
        ),
    ]

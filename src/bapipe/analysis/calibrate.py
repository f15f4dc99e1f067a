"""Costs and links as a machine has them when it trains, from short runs of a few plans.

A profile times one layer at a time, and a link file says what idle links do. When all ranks compute and send at
once, layers share memory and caches with other ranks, every action has the executor's work around it, and messages
wait for a core. Runs of pipelines at two micro-batch sizes tell both: layers are scaled by what the stages took,
between the sizes in proportion, and links are what the messages took. What ranks wait for each other beyond that
is put down to the messages too (`_waits`). A run of data parallelism tells the rate of its sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bapipe.analysis.link_estimate import estimate_links, fit_links
from bapipe.analysis.recalibrate import fit_profile, predict_again, recalibrate
from bapipe.costs.fields import COST_FIELDS, CostTable, as_tuples
from bapipe.costs.profile import Profile, write_profile
from bapipe.costs.segments import Floats
from bapipe.hardware.cluster import Cluster, Link
from bapipe.hardware.cluster_toml import cluster_toml
from bapipe.io.files import write_text
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.records.run_record import RunRecord, to_timeline
from bapipe.units import format_bandwidth, format_seconds

__all__ = ["Calibrated", "ShortRun", "calibrate", "write_calibrated"]

_UNSEEN = 0.9
"""share of the highest rate from which on the sum of gradients cannot be told from none"""
_RATES = (1e-3, 1e15)
"""bytes/s between which the rate of sums is looked for"""
_HALVINGS = 40
_LEAST_ERROR = 0.03
"""relative error below which no corrected layer's time is taken to be known: other plans have other neighbours"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A profile and a cluster to plan with."""

    profile: Profile
    cluster: Cluster
    changes: tuple[str, ...]
    """what differs, a line each"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """A plan that was run for a few steps, once or several times."""

    plan: Plan
    records: tuple[RunRecord, ...]
    seconds: float
    """of a step, median"""


def calibrate(profile: Profile, cluster: Cluster, runs: Sequence[ShortRun]) -> Calibrated:
    """Correct a profile and a cluster by runs of plans that were made from them; several records of a plan count
    with their mean."""
    pipelines = [run for run in runs if len(run.plan.stages) > 1]
    changes: list[str] = []
    corrected, linked = profile, cluster
    if pipelines:
        found: dict[int, list[tuple[Plan, RunRecord]]] = {}
        for run in pipelines:
            found.setdefault(run.plan.microbatch_size, []).extend((run.plan, record) for record in run.records)
        by_size = {size: fit_profile(profile, seen) for size, seen in found.items()}
        again = [[recalibrate(run.plan, record, profile).profile for record in run.records] for run in pipelines]
        corrected = _between(profile, by_size, _spread(again))
        seen = [estimate_links(run.plan, *map(to_timeline, run.records)) for run in pipelines]
        linked = fit_links(cluster, [estimate for of_run in seen for estimate in of_run])
        linked, overhead = _waits(corrected, linked, pipelines)
        corrected = replace(
            corrected,
            accelerators={
                name: replace(table, step_overhead=overhead) for name, table in corrected.accelerators.items()
            },
        )
        changes += [*_layer_changes(profile, by_size), *_link_changes(cluster, linked)]
        changes.append(f"a step takes {format_seconds(overhead)} beside its forwards, backwards and transfers")
    for run in runs:
        # Of a part of the accelerators it would say what links of that part do, not what those of all do.
        if run.plan.kind == "data-parallel" and len(run.plan.ranks) == len(cluster):
            rate = _sum_rate(corrected, linked, run)
            linked = _with_sum_rate(linked, rate)
            changes.append(_sum_change(rate))
    return Calibrated(profile=corrected, cluster=linked, changes=tuple(changes))


def write_calibrated(found: Calibrated, profile: str | Path, cluster: str | Path) -> None:
    """Write the corrected profile.json and cluster.toml."""
    write_profile(found.profile, profile)
    write_text(cluster, cluster_toml(found.cluster, comment="links as runs used them"))


def _waits(profile: Profile, cluster: Cluster, pipelines: Sequence[ShortRun]) -> tuple[Cluster, float]:
    """Links as late as the pipelines' steps say, and the seconds of a step beside its actions.

    A step begins before its first action and ends after its last, which runs show. What the middle pipeline took
    beyond that and the corrected costs, its ranks waited for each other: a message waits for a core, an action
    takes longer than others of its kind, and the next rank waits with it. The more messages follow one another,
    the more of it there is, so that it counts as latency of the links; what no latency explains, as time of the
    step.
    """
    beside = median(_beside(record) for run in pipelines for record in run.records)

    def missing(late: float) -> float:
        later = _later(cluster, late)
        predicted = (plan_timeline(predict_again(run.plan, profile, later)).time for run in pipelines)
        return median(run.seconds - beside - own for run, own in zip(pipelines, predicted, strict=True))

    most = missing(0.0)
    late = _halved(0.0, most, lambda own: missing(own) > 0)[0] if most > 0 >= missing(most) else 0.0
    return _later(cluster, late), max(0.0, beside + missing(late))


def _halved(low: float, high: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
    """The two halved again and again, so that what is looked for stays between them."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


def _beside(record: RunRecord) -> float:
    """Seconds of the recorded step before its first action and after its last."""
    return record.traced.seconds - to_timeline(record).makespan


def _later(cluster: Cluster, seconds: float) -> Cluster:
    """The cluster with so much more latency on every link."""
    return cluster.with_links(lambda link: replace(link, latency=link.latency + seconds)) if seconds else cluster


def _spread(runs: Iterable[Sequence[Profile]]) -> float | None:
    """How far runs of one plan lie apart in the time of all layers, relative, as a standard error; None: each plan
    ran once."""
    errors = []
    for profiles in runs:
        sums = [
            sum(float(np.sum(table.forward) + np.sum(table.backward)) for table in profile.accelerators.values())
            for profile in profiles
        ]
        if len(profiles) > 1:
            errors.append((max(sums) - min(sums)) / (max(sums) + min(sums)))
    return max(_LEAST_ERROR, *errors) if errors else None


def _between(profile: Profile, by_size: dict[int, Profile], spread: float | None) -> Profile:
    """Each micro-batch size corrected as the nearest two that ran: its time lies between theirs as its size does.

    A layer takes some time whatever the size, and some per sample, and runs change the two differently: the ratio
    to the profile is not in proportion to the size, the time is.
    """
    sizes = sorted(by_size)
    tables: dict[str, CostTable] = {}
    for name, table in profile.accelerators.items():
        rows = np.array([np.interp(size, sizes, range(len(sizes))) for size in table.microbatches])
        low, share = np.floor(rows).astype(int), rows - np.floor(rows)
        known = [by_size[size].accelerators[name] for size in sizes]
        changed: dict[str, Any] = {}
        for field, rule in COST_FIELDS.items():
            if rule.ratio is None or getattr(table, field) is None:
                continue
            values = [np.array(getattr(item, field)) for item in known]
            if rule.per == "layer":
                changed[field] = as_tuples(np.mean(values, axis=0))
                continue
            before = [_at_size(table, field, size) for size in sizes]
            mixed = []
            for row, (first, part) in enumerate(zip(low, share, strict=True)):
                second = min(first + 1, len(sizes) - 1)
                less, more = (1 - part) * before[first], part * before[second]
                whole = less + more
                by = np.divide(more, whole, out=np.full_like(whole, part), where=whole > 0)
                mixed.append((1 - by) * values[first][row] + by * values[second][row])
            changed[field] = as_tuples(np.array(mixed))
        tables[name] = replace(
            table, description=known[-1].description, spread=table.spread if spread is None else spread, **changed
        )
    return replace(profile, accelerators=tables)


def _at_size(table: CostTable, field: str, size: int) -> Floats:
    """A field of every layer at a micro-batch size, between the profiled ones in proportion."""
    rows = np.array(getattr(table, field))
    return np.array([np.interp(size, table.microbatches, column) for column in rows.T])


def _sum_rate(profile: Profile, cluster: Cluster, run: ShortRun) -> float:
    """The bytes/s of sums with which a run of data parallelism is predicted to take what it took, by halving."""
    kinds = dict.fromkeys(item.type for item in cluster.accelerators)
    beside = max(profile.table(kind).step_overhead or 0.0 for kind in kinds)

    def predicted(rate: float) -> float:
        summed = _with_sum_rate(cluster, rate)
        return beside + plan_timeline(predict_again(run.plan, profile, summed)).time

    low, high = map(math.log, _RATES)
    return math.exp(sum(_halved(low, high, lambda own: predicted(math.exp(own)) > run.seconds)) / 2)


def _with_sum_rate(cluster: Cluster, rate: float) -> Cluster:
    """The cluster with that rate of sums in buckets, and other collectives faster or slower as those are."""
    before = cluster.collective_rates.buckets or cluster.collective_bandwidth or rate
    others = replace(cluster.collective_rates.slower(before / rate), buckets=None)
    return replace(cluster, collective_bandwidth=rate, collective_rates=others)


def _layer_changes(profile: Profile, by_size: dict[int, Profile]) -> list[str]:
    lines = []
    for size, corrected in sorted(by_size.items()):
        for name in profile.accelerators:
            before, after = (item.at(name, size) for item in (profile, corrected))
            ahead = after.forward.sum() / before.forward.sum()
            back = after.backward.sum() / before.backward.sum()
            lines.append(
                f"layers of {name} at micro-batch {size}: forwards take {ahead:.2f}x, backwards {back:.2f}x the "
                "profiled time"
            )
    return lines


def _link_changes(before: Cluster, after: Cluster) -> list[str]:
    lines = []
    for what, old, new in (("within", before.within, after.within), ("between", before.between, after.between)):
        if new is not None and new != old:
            lines.append(f"links {what} nodes: {_rate(new)}")
    for one, other in zip(before.levels, after.levels, strict=True):
        if other.link is not None and other.link != one.link:
            lines.append(f"links of level {other.name}: {_rate(other.link)}")
    return lines


def _rate(link: Link) -> str:
    return f"latency {format_seconds(link.latency)}, {format_bandwidth(link.bandwidth)}"


def _sum_change(rate: float) -> str:
    if rate > _UNSEEN * _RATES[1]:
        return "gradient sync takes no time that could be seen"
    return f"gradient sync: {format_bandwidth(rate)}"

"""A profile corrected by what a run measured, to plan again with.

The run times stages, the profile layers: each layer of a stage is scaled by the ratio of the stage's measured to
its predicted time, on the accelerator type that ran it and at every micro-batch size. The corrected profile then
predicts for the partition that ran the stage times that were measured; for other partitions it is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.analysis.predicted_measured import Comparison, compare, full_microbatches, mean_work
from bapipe.costs.fields import COST_FIELDS, CostTable, Like, as_tuples
from bapipe.costs.profile import Profile
from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_time import StageSeconds, stage_seconds
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.io.files import content_hash
from bapipe.models.layers import Split
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import run_costs
from bapipe.records.plan import Plan, PlanStage
from bapipe.records.run_record import RunRecord
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["Correction", "Recalibration", "fit_profile", "predict_again", "recalibrate"]

Floats = NDArray[np.float64]
_ROUNDS = 5
"""corrections by all runs; more would lay the noise of stages that differ by few layers on these"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """measured / predicted of one stage on one accelerator type: what its layers' times are multiplied by."""

    accelerator: str
    """type"""
    stage: int
    forward: float
    """of F, and of R where the stage recomputes: the profile has one figure for both"""
    backward: float
    """of B, or of I and W together"""
    input_gradient: float
    """of I; as `backward` where the run has no I and W"""
    weight_gradient: float
    """of W; as `backward` where the run has no I and W"""
    update: float | None
    """of U, all stages of the rank together; None: the run recorded none, or the profile has 0"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """A corrected profile and how it differs from the one that was planned with."""

    profile: Profile
    corrections: tuple[Correction, ...]
    notes: tuple[str, ...]
    """what could not be corrected, and why"""


def recalibrate(plan: Plan, record: RunRecord, profile: Profile) -> Recalibration:
    """Scale the profile's layer times so that the plan's stages take what the run measured (means).

    Layers that a type has not run get its overall ratio; types that have not run stay as they were; bytes stay. A
    layer split between stages gets the mean of their ratios by its parts, so such stages are met only nearly.
    """
    _require_correctable(plan, profile)
    return _recalibrated(plan, record, compare(plan, record), profile)


def fit_profile(profile: Profile, runs: Sequence[tuple[Plan, RunRecord]]) -> Profile:
    """Scale the profile's layer times so that the stages of all these runs take what was measured, as nearly as
    one profile can.

    Every run alone tells the sum of a stage's layers. Where runs cut the model at other layers, the differences of
    such sums tell the layers apart: one run corrects after the other, round after round, and the mean of the last
    round counts. All runs are of one micro-batch size and of plans that were made from this profile.
    """
    for plan, _ in runs:
        _require_correctable(plan, profile)
    compared = [(plan, record, compare(plan, record)) for plan, record in runs]
    described = _recalibrated(*compared[0], profile).profile.accelerators
    fitted = profile
    for _ in range(_ROUNDS if len(runs) > 1 else 1):
        found = []
        for plan, record, seen in compared:
            fitted = _recalibrated(plan, record, seen, fitted).profile
            found.append(fitted)
    return _mean_profile(found, described)


def _mean_profile(profiles: Sequence[Profile], described: Mapping[str, CostTable]) -> Profile:
    """The mean of the times of several corrections of one profile, in the words of `described`."""
    tables = {}
    for name, table in profiles[0].accelerators.items():
        others = [item.accelerators[name] for item in profiles]
        means: dict[str, Any] = {
            field: as_tuples(np.mean([_times(other, field) for other in others], axis=0))
            for field, rule in COST_FIELDS.items()
            if rule.ratio is not None and any(getattr(other, field) is not None for other in others)
        }
        tables[name] = replace(table, description=described[name].description, **means)
    return replace(profiles[0], accelerators=tables)


def _times(table: CostTable, field: str) -> Floats:
    """A field of a table, or what counts where it is not known."""
    known, instead = getattr(table, field), COST_FIELDS[field].unknown
    if known is not None:
        return np.array(known)
    if isinstance(instead, Like):
        return instead.share * _times(table, instead.field)
    assert instead is not None
    return np.full_like(np.array(table.forward), instead)


def _require_correctable(plan: Plan, profile: Profile) -> None:
    if profile.hash != plan.profile_hash:
        raise BaPipeError(
            f"the plan was made from profile {plan.profile_hash}, this one is {profile.hash}; "
            "give the profile that was planned with"
        )
    if not plan.schedule.flushes:
        raise BaPipeError(
            f"a run of {plan.schedule.name} times backward and optimizer step together, a profile has them apart; "
            "recalibrate by a run of another schedule"
        )


def _recalibrated(plan: Plan, record: RunRecord, comparison: Comparison, profile: Profile) -> Recalibration:
    measured = _Measured(plan, comparison, profile)
    corrections: list[Correction] = []
    notes: list[str] = []
    tables = dict(profile.accelerators)
    for accelerator in dict.fromkeys(kind for kinds in measured.types for kind in kinds):
        own = [measured.correction(stage, accelerator, notes) for stage in measured.stages_of(accelerator)]
        corrections += own
        fallback = measured.overall(accelerator)
        tables[accelerator] = _scaled(plan, profile, own, fallback, words=_words(plan, record, own, fallback))
    idle = [name for name in profile.accelerators if name not in {row.accelerator for row in corrections}]
    if idle:
        notes.append(f"not corrected, because the run has none of that type: {', '.join(idle)}")
    if all(row.update is None for row in corrections):
        notes.append("optimizer steps are not corrected: the run or the profile has no times of them")
    return Recalibration(
        profile=replace(profile, accelerators=tables),
        corrections=tuple(sorted(corrections, key=lambda row: (row.stage, row.accelerator))),
        notes=tuple(dict.fromkeys(notes)),
    )


def predict_again(plan: Plan, profile: Profile, cluster: Cluster | None = None) -> Plan:
    """The same partition and order with the stages' times by another profile, and another cluster's links.

    `bapipe.planner.plan_timeline.plan_timeline` then predicts its global batch. The time, the alternatives and the
    memory in the plan are those of the old profile.
    """
    hardware = Hardware(cluster=cluster or plan.cluster)
    chain, choices = _placed_stages(profile, plan)
    candidate = Candidate(
        label=plan.schedule.name,
        chain=chain,
        stages=choices,
        schedule=plan.schedule.to_schedule(),
        zero=plan.zero_stage == 1,
        engine=plan.engine,
    )
    costs = run_costs(candidate, hardware)
    kinds = [item.type for item in plan.cluster.accelerators]
    alone = {kind: _stage_seconds(profile, plan, [(kind,)] * len(plan.stages)) for kind in chain.types}
    seconds = _stage_seconds(profile, plan, _types(plan))
    stages = []
    for index, (stage, choice) in enumerate(zip(plan.stages, choices, strict=True)):
        updates = [costs.update[index]] * len(choice.accelerators)
        if costs.replicas is not None and costs.replicas[index]:
            updates = [own.update for own in costs.replicas[index]]
        replicas = None
        if stage.replicas is not None:
            replicas = tuple(
                replace(own, **_of_stage(alone[kinds[member]], index), update=update)
                for own, member, update in zip(stage.replicas, choice.accelerators, updates, strict=True)
            )
        whole = {"forward": costs.forward[index], "backward": costs.backward[index]}
        stages.append(
            replace(
                stage,
                **{**_of_stage(seconds, index), **whole},
                update=costs.update[index],
                all_reduce=costs.all_reduce[index],
                replicas=replicas,
            )
        )
    return replace(plan, stages=tuple(stages), profile_hash=profile.hash, cluster=hardware.cluster)


def _of_stage(seconds: StageSeconds, index: int) -> dict[str, Any]:
    """The seconds of one stage, by the names that a plan has for them."""
    names = ("forward", "backward", "weight_gradient", "parting")
    return {name: float(getattr(seconds, name)[index]) for name in names}


def _shares(stage: PlanStage, layers: int) -> Floats:
    """Which part of each of the model's layers the stage has."""
    shares = np.zeros(layers)
    shares[stage.first_layer : stage.last_layer + 1] = 1.0
    for part in stage.fractions:
        shares[part.layer] = (part.stop - part.start) / part.of
    return shares


def _stage_seconds(profile: Profile, plan: Plan, types: Sequence[Sequence[str]]) -> StageSeconds:
    """What the plan's stages take by the profile, each on the slowest of these accelerator types."""
    chain, choices = _placed_stages(profile, plan)
    spans = [(choice.first, choice.last) for choice in choices]
    return stage_seconds(chain, spans, [[chain.types.index(name) for name in kinds] for kinds in types])


def _placed_stages(profile: Profile, plan: Plan) -> tuple[Chain, tuple[StageChoice, ...]]:
    """The units of the profile's layers that the plan cuts between, and its stages on them."""
    parts = {part.layer: part for stage in plan.stages for part in stage.fractions}
    layers = tuple(
        layer
        if index not in parts
        else replace(layer, split=replace(layer.split or Split(channels=2), channels=parts[index].of))
        for index, layer in enumerate(profile.layers)
    )
    names = tuple(dict.fromkeys(name for kinds in _types(plan) for name in kinds))
    divided = {layer: part.of for layer, part in parts.items()}
    chain = make_chain(replace(profile, layers=layers), names, plan.microbatch_size, split=divided)
    place = {(unit.layer, unit.start): index for index, unit in enumerate(chain.units)}
    runs = [run for stage in plan.stages for run in stage.recompute_layers]
    chain = recomputing(chain, tuple((place[run.first, 0], place[run.last, 0]) for run in runs))
    number = {accelerator.name: index for index, accelerator in enumerate(plan.cluster.accelerators)}
    choices = []
    for stage in plan.stages:
        own = {part.layer: part for part in stage.fractions}
        begin, end = own.get(stage.first_layer), own.get(stage.last_layer)
        of = parts[stage.last_layer].of if stage.last_layer in parts else 1
        choices.append(
            StageChoice(
                first=place[stage.first_layer, begin.start if begin else 0],
                last=place[stage.last_layer, (end.stop if end else of) - 1],
                accelerators=tuple(number[name] for name in stage.accelerators),
                recompute=stage.recompute,
            )
        )
    return chain, tuple(choices)


def _types(plan: Plan) -> list[tuple[str, ...]]:
    """The accelerator types of each stage."""
    kind_of = {accelerator.name: accelerator.type for accelerator in plan.cluster.accelerators}
    return [tuple(dict.fromkeys(kind_of[name] for name in stage.accelerators)) for stage in plan.stages]


class _Measured:
    """What a run measured of each stage on each accelerator type, beside the profile's figures."""

    def __init__(self, plan: Plan, comparison: Comparison, profile: Profile) -> None:
        self._plan = plan
        self._timeline: Timeline = comparison.measured
        self._split = bool((self._timeline.kinds == Kind.W).any())
        self.types = _types(plan)
        self._ranks: dict[tuple[int, str], list[int]] = {}
        """stage and type -> the ranks of that type that ran it"""
        kind_of = {accelerator.name: accelerator.type for accelerator in plan.cluster.accelerators}
        kinds = [kind_of[name] for name in plan.ranks]
        for row in comparison.stages:
            self._ranks.setdefault((row.stage, kinds[row.rank]), []).append(row.rank)
        self._seconds = {
            kind: _stage_seconds(profile, plan, [(kind,)] * len(plan.stages)) for kind in dict.fromkeys(kinds)
        }

    def stages_of(self, accelerator: str) -> list[int]:
        return [stage for stage, kinds in enumerate(self.types) if accelerator in kinds]

    def seconds(self, stage: int, accelerator: str, *kinds: Kind) -> float | None:
        """Mean of the stage's actions of these kinds over its ranks of that type; None: it has none."""
        ranks = self._ranks[stage, accelerator]
        for below in (full_microbatches(self._plan), self._plan.microbatches):
            found = mean_work(self._timeline, stage, ranks, kinds, below=below)
            if found is not None:
                return found
        return None

    def backward(self, stage: int, accelerator: str) -> float | None:
        parts = [
            self.seconds(stage, accelerator, kind) for kind in ((Kind.I, Kind.W) if self._split else (Kind.B,))
        ]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    def update(self, stage: int, accelerator: str) -> tuple[float, float] | None:
        """Seconds measured and predicted of the optimizer steps of the ranks with the stage, all their stages.

        An optimizer takes a rank's stages in one step, so that their parts cannot be separated.
        """
        measured = predicted = 0.0
        for rank in self._ranks[stage, accelerator]:
            own = (self._timeline.ranks == rank) & (self._timeline.kinds == Kind.U)
            measured += float(self._timeline.work[own].sum())
            for other in set(self._timeline.stages[own].tolist()):
                predicted += float(self._seconds[accelerator].update[other])
        return (measured, predicted) if measured > 0 and predicted > 0 else None

    def correction(self, stage: int, accelerator: str, notes: list[str]) -> Correction:
        costs = self._seconds[accelerator]

        def ratio(measured: float | None, predicted: float, what: str) -> float:
            if measured is None:
                notes.append(f"stage {stage} on {accelerator} ran no {what}; its times stay")
                return 1.0
            if not (measured > 0 and predicted > 0):
                zero = "predicted" if measured > 0 else "measured"
                notes.append(f"{what} of stage {stage} is {zero} at 0 s on {accelerator}; its times stay")
                return 1.0
            return measured / predicted

        more = float(costs.parting[stage]) if self._split else 0.0
        ahead, whole = float(costs.forward[stage]), float(costs.backward[stage])
        weights = float(costs.weight_gradient[stage])
        backward = ratio(self.backward(stage, accelerator), whole + more, "backward")
        parts = (backward, backward)
        if self._split and 0 < weights < whole:
            parts = (
                ratio(self.seconds(stage, accelerator, Kind.I), whole - weights, "input gradient"),
                ratio(self.seconds(stage, accelerator, Kind.W), weights + more, "weight gradient"),
            )
        update = self.update(stage, accelerator)
        return Correction(
            accelerator=accelerator,
            stage=stage,
            forward=ratio(self.seconds(stage, accelerator, Kind.F, Kind.R), ahead, "forward"),
            backward=backward,
            input_gradient=parts[0],
            weight_gradient=parts[1],
            update=None if update is None else update[0] / update[1],
        )

    def overall(self, accelerator: str) -> Correction:
        """measured / predicted of all that the type has run, for the layers that it has not."""
        rows = [self.correction(stage, accelerator, []) for stage in self.stages_of(accelerator)]
        costs = self._seconds[accelerator]

        def mean(field: str, seconds: Floats) -> float:
            ratios = [(getattr(row, field), float(seconds[row.stage])) for row in rows]
            known = [(ratio, weight) for ratio, weight in ratios if ratio is not None]
            total = sum(weight for _, weight in known)
            return sum(ratio * weight for ratio, weight in known) / total if total > 0 else 1.0

        updates = any(row.update is not None for row in rows)
        return Correction(
            accelerator=accelerator,
            stage=-1,
            forward=mean("forward", costs.forward),
            backward=mean("backward", costs.backward),
            input_gradient=mean("input_gradient", costs.backward - costs.weight_gradient),
            weight_gradient=mean("weight_gradient", costs.weight_gradient),
            update=mean("update", costs.update) if updates else None,
        )


def _scaled(
    plan: Plan, profile: Profile, corrections: Sequence[Correction], fallback: Correction, *, words: str
) -> CostTable:
    """The type's costs, each layer by the ratios of the stages that ran it, weighted by its parts."""
    table = profile.table(fallback.accelerator)
    shares = [_shares(plan.stages[row.stage], len(profile.layers)) for row in corrections]
    rest = 1.0 - np.sum(shares, axis=0)

    def factors(field: str) -> Floats:
        ratios = [getattr(row, field) for row in (*corrections, fallback)]
        parts = zip(ratios, (*shares, rest), strict=True)
        return np.asarray(sum(part * (1.0 if ratio is None else ratio) for ratio, part in parts), dtype=np.float64)

    changed: dict[str, Any] = {
        name: as_tuples(np.array(getattr(table, name)) * factors(rule.ratio))
        for name, rule in COST_FIELDS.items()
        if rule.ratio is not None and getattr(table, name) is not None
    }
    if any(not row.input_gradient == row.weight_gradient == row.backward for row in corrections):
        whole = np.array(table.backward)
        weight = whole / 2 if table.weight_gradient is None else np.array(table.weight_gradient)
        inputs = np.maximum(0.0, whole - weight) * factors("input_gradient")
        weight = weight * factors("weight_gradient")
        changed |= {"backward": as_tuples(inputs + weight), "weight_gradient": as_tuples(weight)}
    return replace(table, description=f"{table.description} | {words}", **changed)


def _words(plan: Plan, record: RunRecord, corrections: Sequence[Correction], fallback: Correction) -> str:
    """What the profile says of its correction."""

    def span(ratios: Sequence[float]) -> str:
        low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
        return f"×{low}" if low == high else f"×{low} to ×{high}"

    updates = [row.update for row in corrections if row.update is not None]
    parts = [
        f"forward {span([row.forward for row in corrections])}",
        f"backward {span([row.backward for row in corrections])}",
        *([f"optimizer step {span(updates)}"] if updates else []),
    ]
    missing = _missing(plan, corrections)
    guess = f"; layers that it has not run: forward ×{fallback.forward:.3f}, backward ×{fallback.backward:.3f}"
    return (
        f"recalibrated by run {content_hash(record)} of plan {record.plan_hash} at micro-batch "
        f"{plan.microbatch_size}: {', '.join(parts)}{guess if missing else ''}"
    )


def _missing(plan: Plan, corrections: Sequence[Correction]) -> bool:
    """Whether the plan has layers that these stages do not run whole."""
    count = 1 + max(stage.last_layer for stage in plan.stages)
    held = np.sum([_shares(plan.stages[row.stage], count) for row in corrections], axis=0)
    return bool((held < 1 - 1e-9).any())

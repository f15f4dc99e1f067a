"""The orders BaPipe knows: from N stages and M micro-batches to a Schedule.

Every synchronous 1F1B variant is one order with a cap K_i on the in-flight micro-batches at stage i:
`F × min(M, K_i − 1)`, then F and B in turn, then the remaining B. For N = 3, M = 4:

    1f1b-sno  K = 3, 2, 1            1f1b-so  K = 6, 4, 2 (here cut to M = 4)
    0  F0 F1 F2 B0 F3 B1 B2 B3       0  F0 F1 F2 F3 B0 B1 B2 B3
    1     F0 F1 B0 F2 B1 F3 B2 B3    1     F0 F1 F2 F3 B0 B1 B2 B3
    2        F0 B0 F1 B1 F2 B2 …     2        F0 F1 B0 F2 B1 F3 B2 B3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bapipe.errors import BaPipeError, nearest
from bapipe.schedule.actions import Concurrency, Kind, Lane, Schedule, Sending
from bapipe.schedule.dealing import Dealing, most_in_a_row, own_microbatches, require_dealing, widest_span
from bapipe.schedule.inflight import stage_caps
from bapipe.schedule.interleaving import interleaved
from bapipe.schedule.lane_builders import one_f_one_b_lane, one_stage_lane, require_sizes
from bapipe.schedule.replicas import replicated
from bapipe.schedule.v_shape import V_SHAPED, dualpipe_v, v_half, v_min, zb_v
from bapipe.schedule.zero_bubble import zb_h1, zb_h2, zero_bubble

__all__ = [
    "SCHEDULES",
    "Generator",
    "answered_caps",
    "capped",
    "data_parallel",
    "fbp_as",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b_as",
    "one_f_one_b_sno",
    "one_f_one_b_so",
    "pipedream",
    "with_recompute",
    "with_update",
]


class Generator(Protocol):
    """Makes a Schedule of N stages and M micro-batches."""

    def __call__(self, num_stages: int, num_microbatches: int, /) -> Schedule: ...


def capped(
    num_stages: int,
    num_microbatches: int,
    caps: Sequence[int],
    *,
    name: str = "1f1b",
    replicas: Sequence[int] | None = None,
    dealing: Sequence[Dealing] | None = None,
    sending: Sending = "after-compute",
) -> Schedule:
    """1F1B with at most caps[i] in-flight micro-batches at stage i.

    Micro-batches run whole on one replica of a stage, dealt in turn or as `dealing` has it for each stage, and
    each holds its share of K_i, ⌈K_i/r⌉ of r in turn. With `dealing` a stage has as many in flight as the replicas
    behind it may ask for before they answer.
    """
    require_sizes(num_stages, num_microbatches)
    if len(caps) != num_stages:
        raise BaPipeError(f"{num_stages} stages need {num_stages} caps, got {len(caps)}; give one K per stage")
    if min(caps) < 1:
        raise BaPipeError(f"a cap must be at least 1, got {min(caps)}; a stage must hold one micro-batch")
    counts = [1] * num_stages if replicas is None else list(replicas)
    if len(counts) != num_stages or min(counts) < 1:
        raise BaPipeError(
            f"{num_stages} stages need {num_stages} replica counts of at least 1, got {list(counts)}"
        )
    dealt = [()] * num_stages if dealing is None else [tuple(own) for own in dealing]
    if len(dealt) != num_stages:
        raise BaPipeError(f"{num_stages} stages need {num_stages} dealings, got {len(dealt)}; give one per stage")
    for stage, taken in enumerate(dealt):
        require_dealing(taken, counts[stage], num_microbatches, stage=stage)
    caps = caps if dealing is None else answered_caps(caps, counts, dealt)
    placement, lanes, rank = [], [], 0
    for stage, (cap, count, taken) in enumerate(zip(caps, counts, dealt, strict=True)):
        placement.append(tuple(range(rank, rank + count)))
        for replica in range(count):
            own = own_microbatches(taken, count, replica, num_microbatches)
            lanes.append(one_f_one_b_lane(rank, stage, most_in_a_row(taken, count, replica, cap), own))
            rank += 1
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        lanes=tuple(lanes),
        caps=tuple(
            cap if taken else -(-cap // count) * count
            for cap, count, taken in zip(caps, counts, dealt, strict=True)
        ),
        sending=sending,
        dealing=tuple(dealt) if any(dealt) else None,
    )


def answered_caps(caps: Sequence[int], counts: Sequence[int], dealt: Sequence[Dealing]) -> list[int]:
    """The caps, none so small that a replica behind waits for a micro-batch that waits for its answer.

    A replica that holds c answers its first once it has its c-th, which may lie far behind where it takes few.
    """
    found, span = list(caps), 0
    for stage in range(len(found) - 1, -1, -1):
        found[stage] = max(found[stage], span + 1)
        count, taken = counts[stage], dealt[stage]
        for replica in range(count):
            held = most_in_a_row(taken, count, replica, found[stage])
            span = max(span, widest_span(taken, count, replica, held))
    return found


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: K_i = M."""
    return _one_per_rank("gpipe", num_stages, num_microbatches)


def one_f_one_b_sno(num_stages: int, num_microbatches: int) -> Schedule:
    """The paper's 1F1B-SNO, K_i = N−i+1 (Table II): least memory, communication exposed."""
    return _one_per_rank("1f1b-sno", num_stages, num_microbatches)


def one_f_one_b_so(num_stages: int, num_microbatches: int) -> Schedule:
    """The paper's 1F1B-SO, K_i = 2(N−i+1) (Table II): communication overlapped, twice the activations."""
    return _one_per_rank("1f1b-so", num_stages, num_microbatches)


def one_f_one_b_as(num_stages: int, num_microbatches: int) -> Schedule:
    """The paper's 1F1B-AS, K_i = N−i+1 on cut-through links (Table I)."""
    return _one_per_rank("1f1b-as", num_stages, num_microbatches, sending="cut-through")


def _one_per_rank(
    name: str, num_stages: int, num_microbatches: int, *, sending: Sending = "after-compute"
) -> Schedule:
    """A capped order whose K the schedule's name settles (`bapipe.schedule.inflight`)."""
    require_sizes(num_stages, num_microbatches)
    caps = stage_caps(name, [1] * num_stages, num_microbatches)
    return capped(num_stages, num_microbatches, caps, name=name, sending=sending)


def fbp_as(num_stages: int, num_microbatches: int, *, slots: str = "table") -> Schedule:
    """The paper's FBP-AS: forward and backward at once, K_i = 2(N−i+1), cut-through links.

    slots="table": F(m,i) runs in lockstep slot m+i−1, B(m,i) in slot m+2N−i; a slot costs F and B of what is
    active in it: (M+N−1)(F+B), as Table I. slots="static": the compute units are split for good between
    forward and backward, so each takes F+B: (M+2N−1)(F+B).

        0  F0 F1 F2 F3 F4 F5 F6 F7           N = 3: F on one lane,
           -- -- -- -- -- B0 B1 B2 B3 …      B on the other
    """
    require_sizes(num_stages, num_microbatches)
    rules: dict[str, Concurrency] = {"table": "slots", "static": "static"}
    if slots not in rules:
        raise BaPipeError(f"unknown slot rule '{slots[:40]}'; give table or static{nearest(slots, rules)}")
    order = np.arange(num_microbatches, dtype=np.int64)
    lanes = []
    for stage in range(num_stages):
        for kind, name in ((Kind.F, "forward"), (Kind.B, "backward")):
            kinds = np.full(num_microbatches, int(kind), dtype=np.int64)
            lanes.append(one_stage_lane(stage, stage, kinds, order, name))
    return Schedule(
        name="fbp-as",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple((stage,) for stage in range(num_stages)),
        lanes=tuple(lanes),
        caps=tuple(stage_caps("fbp-as", [1] * num_stages, num_microbatches)),
        sending="cut-through",
        concurrency=rules[slots],
    )


def pipedream(num_stages: int, num_microbatches: int) -> Schedule:
    """PipeDream: 1F1B over whole batches that never flushes; N−i+1 weight versions at stage i.

    Here each of the M entries is a batch with an optimizer step of its own.
    """
    base = _one_per_rank("pipedream", num_stages, num_microbatches)
    return _replace(base, weight_versions=base.caps, flushes=False)


def data_parallel(replicas: int, accumulation: int = 1) -> Schedule:
    """Plain data parallelism as a one-stage pipeline: each replica runs its share of the micro-batches."""
    require_sizes(replicas, accumulation)
    base = capped(1, replicas * accumulation, [replicas], name="data-parallel", replicas=[replicas])
    return with_update(base)


def with_recompute(schedule: Schedule, stages: Sequence[int] | None = None) -> Schedule:
    """Insert R before every B (or I) of the given stages (default: all): the forward runs twice."""
    chosen = set(range(schedule.num_stages) if stages is None else stages)
    known: tuple[set[int], Schedule] | None = vars(schedule).get("_recomputing")
    if known is not None and known[0] == chosen:
        return known[1]
    lanes = []
    for lane in schedule.lanes:
        starts = np.isin(lane.kinds, (Kind.B, Kind.I)) & np.isin(lane.stages, sorted(chosen))
        at = np.flatnonzero(starts)
        lanes.append(
            Lane(
                lane.rank,
                np.insert(lane.kinds, at, int(Kind.R)),
                np.insert(lane.stages, at, lane.stages[at]),
                np.insert(lane.microbatches, at, lane.microbatches[at]),
                lane.name,
            )
        )
    made = _replace(schedule, lanes=tuple(lanes))
    vars(schedule)["_recomputing"] = (chosen, made)
    return made


def with_update(schedule: Schedule, *, replicas: int = 1) -> Schedule:
    """Append each stage's all-reduce A (on a lane of its own, where there are replicas) and optimizer step U.

    `replicas` says how often the whole schedule will be there (`replicated_pipelines`): with several, all stages
    have an all-reduce. The schedule remembers what comes of it, because it is often timed under many costs.
    """
    known: tuple[bool, Schedule] | None = vars(schedule).get("_updating")
    if known is not None and known[0] == (replicas > 1):
        return known[1]
    lanes = list(schedule.lanes)
    for rank in range(schedule.num_ranks):
        own = schedule.stages_of(rank)
        reduced = [stage for stage in reversed(own) if replicas * len(schedule.placement[stage]) > 1]
        if reduced:
            kinds = np.full(len(reduced), int(Kind.A), dtype=np.int64)
            none = np.full(len(reduced), -1, dtype=np.int64)
            lanes.append(Lane(rank, kinds, np.array(reduced, dtype=np.int64), none, "all-reduce"))
        last = max(i for i, lane in enumerate(lanes) if lane.rank == rank and lane.name != "all-reduce")
        lane, count = lanes[last], len(own)
        lanes[last] = Lane(
            rank,
            np.concatenate([lane.kinds, np.full(count, int(Kind.U), dtype=np.int64)]),
            np.concatenate([lane.stages, np.array(own[::-1], dtype=np.int64)]),
            np.concatenate([lane.microbatches, np.full(count, -1, dtype=np.int64)]),
            lane.name,
        )
    made = _replace(schedule, lanes=tuple(lanes))
    vars(schedule)["_updating"] = (replicas > 1, made)
    return made


def _replace(schedule: Schedule, **changes: object) -> Schedule:
    fields = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    return Schedule(**{**fields, **changes})


SCHEDULES: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b-sno": one_f_one_b_sno,
    "1f1b-so": one_f_one_b_so,
    "1f1b-as": one_f_one_b_as,
    "fbp-as": fbp_as,
    "pipedream": pipedream,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""The named orders that need nothing but N and M; `1f1b` (`capped`) and `zb` (`zero_bubble`) also need caps.

N counts the ranks where a rank has several stages: interleaved and V-shaped ones.
"""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    caps: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    dealing: Sequence[Dealing] | None = None,
    virtual: int | Sequence[int] = 2,
    slots: str = "table",
) -> Schedule:
    """The schedule of that name. `caps` belong to 1f1b and zb; `virtual`, stages of each rank or of every
    one, to interleaved; `slots` to fbp-as.

    `dealing` says which replicas of each stage take which micro-batches; zero-bubble orders replicate whole
    pipelines, so there it is the same for all stages.
    """
    known = [*SCHEDULES, "1f1b", "zb"]
    if name not in known:
        raise BaPipeError(f"unknown schedule '{name[:60]}'{nearest(name, known)}; known: {', '.join(known)}")
    require_sizes(num_stages, num_microbatches)
    if replicas is not None and (len(replicas) != num_stages or min(replicas) < 1):
        raise BaPipeError(
            f"{num_stages} stages need {num_stages} replica counts of at least 1, got {list(replicas)[:16]}"
        )
    if caps is not None and name not in ("1f1b", "zb"):
        raise BaPipeError(f"--in-flight belongs to the schedules 1f1b and zb; {name} sets its own K per stage")
    if name == "interleaved":
        whole = _of_whole_pipelines(name, dealing)
        return replicated(
            name, lambda count: interleaved(num_stages, count, virtual=virtual), num_microbatches, replicas, whole
        )
    if name == "fbp-as":
        _refuse_replicas(name, replicas)
        return fbp_as(num_stages, num_microbatches, slots=slots)
    if name in ("1f1b", "zb"):
        if caps is None:
            raise BaPipeError(f"{name} needs --in-flight, one K per stage, such as --in-flight 7,5,3,1")
        if name == "zb":
            held = tuple(caps)
            whole = _of_whole_pipelines(name, dealing)
            return replicated(
                name, lambda count: zero_bubble(num_stages, count, held), num_microbatches, replicas, whole
            )
        return capped(num_stages, num_microbatches, caps, replicas=replicas, dealing=dealing)
    if name in ("zb-h1", "zb-h2", *V_SHAPED):
        order, whole = SCHEDULES[name], _of_whole_pipelines(name, dealing)
        return replicated(name, lambda count: order(num_stages, count), num_microbatches, replicas, whole)
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    if replicas is None or max(replicas) == 1:
        return schedule
    if name not in ("gpipe", "1f1b-sno", "1f1b-so"):
        _refuse_replicas(name, replicas)
    caps = stage_caps(name, replicas, num_microbatches)
    return capped(num_stages, num_microbatches, caps, name=name, replicas=replicas, dealing=dealing)


def _of_whole_pipelines(name: str, dealing: Sequence[Dealing] | None) -> Dealing:
    if dealing is None:
        return ()
    if len(set(dealing)) > 1:
        raise BaPipeError(f"{name} replicates whole pipelines; deal all stages alike, got {list(dealing)[:4]}")
    return tuple(dealing[0])


def _refuse_replicas(name: str, replicas: Sequence[int] | None) -> None:
    if replicas is not None and max(replicas) > 1:
        raise BaPipeError(f"{name} runs without replicated stages; drop --replicas or choose a 1f1b schedule")

"""Is a schedule right? Every action once and in order, on its rank, within the caps, and free of deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bapipe.errors import DeadlockError, ScheduleError
from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.schedule.channel_window import WINDOW, stops_at
from bapipe.simulator.engine import time_tasks
from bapipe.simulator.lowering import Network, lower

__all__ = ["ScheduleProblem", "Sends", "check", "require_valid", "table_around"]

Sends = Literal["preposted", "windowed", "rendezvous"]
_ENOUGH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem:
    """What is wrong, where, and what to change."""

    rank: int
    lane: int
    """index into the schedule's lanes; -1 where an action is missing altogether"""
    position: int
    message: str
    deadlock: bool = False


def check(
    schedule: Schedule, *, sends: Sends = "preposted", unanswered: Collection[int] = ()
) -> list[ScheduleProblem]:
    """What is wrong with a schedule, up to 100 problems; an empty list means it is right. Linear in its actions.

    sends="preposted": receives are posted ahead and sends never block.
    sends="windowed": a bounded number of receives and of messages under way, as in BaPipe's own runtime
    (`channel_window`); for orders of one computing lane per rank. `unanswered` are the boundaries over which no
    gradient comes back, which only the captured model tells.
    sends="rendezvous": a send blocks until the receiver asks; a send and the next receive from the same neighbour
    go together (as in Megatron). Orders that run ahead, such as interleaved ones, need preposted receives.
    """
    problems = _check_actions(schedule)
    if not problems:
        problems = _check_caps(schedule)
    if not problems:
        problems = _check_deadlock(schedule, sends)
    if not problems and sends == "windowed":
        problems = _check_window(schedule, unanswered)
    return problems


def require_valid(schedule: Schedule, *, sends: Sends = "preposted", unanswered: Collection[int] = ()) -> None:
    """Raise ScheduleError (DeadlockError) naming rank and action, with the table around the offending cell."""
    problems = check(schedule, sends=sends, unanswered=unanswered)
    if problems:
        first = problems[0]
        others = f"{len(problems) - 1}{' or' if len(problems) == _ENOUGH else ''} more"
        more = f" (and {others})" if len(problems) > 1 else ""
        kind = DeadlockError if first.deadlock else ScheduleError
        raise kind(f"{first.message}{more}\n{table_around(schedule, first)}")


def table_around(schedule: Schedule, problem: ScheduleProblem, *, reach: int = 5, rows: int = 4) -> str:
    """The schedule near a problem, a line per lane, the offending cell in [brackets]."""
    centre = max(problem.lane, 0)
    low, high = max(0, centre - rows), min(len(schedule.lanes), centre + rows + 1)
    first = max(0, problem.position - reach)
    lines = []
    for index in range(low, high):
        lane = schedule.lanes[index]
        last = min(len(lane), problem.position + reach + 1)
        cells = []
        for position in range(first, last):
            offending = index == problem.lane and position == problem.position
            cells.append(f"[{lane[position]}]" if offending else f" {lane[position]} ")
        if index == problem.lane and problem.position >= len(lane):
            cells.append("[nothing]")
        before, after = " …" if first else "  ", " …" if last < len(lane) else ""
        lines.append(f"rank {lane.rank:<3}{before} " + "".join(f"{cell:<7}" for cell in cells).rstrip() + after)
    return "\n".join(lines)


def _check_actions(schedule: Schedule) -> list[ScheduleProblem]:
    problems: list[ScheduleProblem] = []
    seen: dict[tuple[int, Kind, int], int] = {}
    for index, lane in enumerate(schedule.lanes):
        for position, action in enumerate(lane):
            text = _misplaced(schedule, action, index, seen)
            if text is not None:
                message = f"rank {lane.rank}: {text}"
                problems.append(ScheduleProblem(rank=lane.rank, lane=index, position=position, message=message))
                if len(problems) == _ENOUGH:
                    return problems
            seen.setdefault(_key(action, lane.rank), position)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            text = _missing(stage, microbatch, seen)
            if text is not None:
                rank = schedule.rank_of(stage, microbatch)
                at = next((i for i, lane in enumerate(schedule.lanes) if lane.rank == rank), -1)
                position = len(schedule.lanes[at]) if at >= 0 else 0
                problems.append(
                    ScheduleProblem(rank=rank, lane=at, position=position, message=f"rank {rank}: {text}")
                )
                if len(problems) == _ENOUGH:
                    return problems
    return problems


def _key(action: Action, rank: int) -> tuple[int, Kind, int]:
    """What must be unique: a micro-batch's action anywhere, a global batch's A or U on its rank."""
    return (action.stage, action.kind, rank if action.microbatch is None else action.microbatch)


def _misplaced(
    schedule: Schedule, action: Action, lane: int, seen: dict[tuple[int, Kind, int], int]
) -> str | None:
    rank, key = schedule.lanes[lane].rank, _key(action, schedule.lanes[lane].rank)
    if action.stage >= schedule.num_stages or (action.microbatch or 0) >= schedule.num_microbatches:
        sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches"
        return f"{action} is outside {sizes}; correct it"
    if action.microbatch is None and rank not in schedule.placement[action.stage]:
        return f"{action} is on a rank without stage {action.stage}; move it"
    if action.microbatch is not None and schedule.rank_of(action.stage, action.microbatch) != rank:
        return f"{action} belongs to rank {schedule.rank_of(action.stage, action.microbatch)}; move it there"
    if key in seen:
        return f"{action} runs twice, first at position {seen[key]}; remove one"
    before = _needed_before(schedule, action, lane, seen)
    if before is not None:
        return f"{action} runs before {before}; put {before} ahead of it"
    after = _too_late_for(action, rank, seen)
    return None if after is None else f"{action} runs after {after}; put it ahead of {after}"


def _needed_before(
    schedule: Schedule, action: Action, lane: int, seen: dict[tuple[int, Kind, int], int]
) -> Action | None:
    """What must stand before this action and does not."""
    needed = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.R: Kind.F, Kind.W: Kind.I}.get(action.kind)
    if needed is None or action.microbatch is None or (action.stage, needed, action.microbatch) in seen:
        return None
    rank = schedule.lanes[lane].rank
    if schedule.concurrency != "none" and sum(other.rank == rank for other in schedule.lanes) > 1:
        return None  # the other lane runs at the same time; the deadlock check orders the two
    return Action(action.stage, needed, action.microbatch)


def _too_late_for(action: Action, rank: int, seen: dict[tuple[int, Kind, int], int]) -> Action | None:
    """What must stand behind this action and was there already: the optimizer step, and for R its backward."""
    if action.microbatch is None:
        return None
    if (action.stage, Kind.U, rank) in seen:
        return Action(action.stage, Kind.U)
    if action.kind == Kind.R:
        for kind in (Kind.B, Kind.I):
            if (action.stage, kind, action.microbatch) in seen:
                return Action(action.stage, kind, action.microbatch)
    return None


def _missing(stage: int, microbatch: int, seen: dict[tuple[int, Kind, int], int]) -> str | None:
    has = {kind for kind in Kind if (stage, kind, microbatch) in seen}
    name = f"{stage}{{}}{microbatch}"
    if Kind.F not in has:
        return f"{name.format('F')} never runs; add it"
    if Kind.B in has and (Kind.I in has or Kind.W in has):
        return f"{name.format('B')} is a full backward, yet I or W of it runs too; keep either B or I and W"
    if Kind.B not in has and not {Kind.I, Kind.W} <= has:
        wanted = name.format("W") if Kind.I in has else name.format("B")
        return f"{wanted} never runs; add it"
    return None


def _check_caps(schedule: Schedule) -> list[ScheduleProblem]:
    """No replica holds more micro-batches than its share of its stage's K. On several lanes the simulator enforces
    it."""
    if schedule.caps is None or schedule.concurrency != "none":
        return []
    problems = []
    for index, lane in enumerate(schedule.lanes):
        inflight: dict[int, int] = defaultdict(int)
        caps = {
            stage: schedule.replica_cap(stage, schedule.placement[stage].index(lane.rank))
            for stage in schedule.stages_of(lane.rank)
        }
        for position, action in enumerate(lane):
            if action.kind == Kind.F:
                inflight[action.stage] += 1
                cap = caps[action.stage]
                if cap is not None and inflight[action.stage] > cap:
                    message = (
                        f"rank {lane.rank}: {action} makes {inflight[action.stage]} in-flight micro-batches at "
                        f"stage {action.stage}, over its cap of {cap}; run a backward first or raise the cap"
                    )
                    problems.append(
                        ScheduleProblem(rank=lane.rank, lane=index, position=position, message=message)
                    )
                    break
            elif action.kind in (Kind.B, Kind.W):
                inflight[action.stage] -= 1
    return problems


def _check_deadlock(schedule: Schedule, sends: Sends) -> list[ScheduleProblem]:
    blocking = sends == "rendezvous"
    lowered = lower(schedule, Network(sending="blocking") if blocking else Network())
    tasks, free = len(lowered.kinds), np.zeros(len(lowered.channels))
    times = time_tasks(lowered.graph, duration=np.ones(tasks), occupy=free, latency=free)
    if times.done == tasks:
        return []
    stuck = []
    ran = ~np.isnan(times.end) & (lowered.kinds <= Kind.U)
    for index, lane in enumerate(schedule.lanes):
        low, high = lowered.graph.lane_start[index : index + 2]
        position = int(np.count_nonzero(ran[low:high]))
        if position < len(lane):
            stuck.append((index, position))
    problems = []
    waits = ", ".join(f"rank {schedule.lanes[i].rank} at {schedule.lanes[i][at]}" for i, at in stuck[:4])
    for index, position in stuck:
        rank, action = schedule.lanes[index].rank, schedule.lanes[index][position]
        how = "with blocking sends " if blocking else ""
        message = (
            f"rank {rank}: {action} {how}waits for ever (deadlock; waiting: {waits}"
            f"{' …' if len(stuck) > 4 else ''}); {_advice(action, blocking)}"
        )
        problems.append(ScheduleProblem(rank=rank, lane=index, position=position, message=message, deadlock=True))
    return problems


def _check_window(schedule: Schedule, unanswered: Collection[int]) -> list[ScheduleProblem]:
    stuck = stops_at(schedule, unanswered=unanswered)
    what = "gradients, or activations without a gradient," if unanswered else "gradients"
    waits = ", ".join(f"rank {rank} at {action}" for rank, action in list(stuck.items())[:4])
    problems = []
    for rank, action in stuck.items():
        index, position = next(
            (index, list(lane).index(action))
            for index, lane in enumerate(schedule.lanes)
            if lane.rank == rank and action in lane
        )
        message = (
            f"rank {rank}: {action} waits for ever (deadlock: at most {WINDOW} {what} may be under way that "
            f"nobody asks for; waiting: {waits}{' …' if len(stuck) > 4 else ''}); run the actions that take "
            "them earlier"
        )
        problems.append(ScheduleProblem(rank=rank, lane=index, position=position, message=message, deadlock=True))
    return problems


def _advice(action: Action, blocking: bool) -> str:
    if blocking:
        return "reorder it, or run it with preposted receives"
    if action.kind in (Kind.A, Kind.U):
        return f"put it behind the last backward of stage {action.stage}"
    if action.kind == Kind.F:
        return f"stage {action.stage - 1} must run {action.stage - 1}F{action.microbatch} earlier"
    return f"stage {action.stage + 1} must run its backward of micro-batch {action.microbatch} earlier"

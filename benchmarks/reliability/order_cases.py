"""Orders for the model check: every generator at every size, all orders of tiny pipelines, and random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.schedule.generators import (
    SCHEDULES,
    capped,
    data_parallel,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
)

__all__ = ["all_orders", "generated", "known_deadlock", "made", "random_order"]


def made(orders: dict[int, list[Action]], placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    """A schedule of one lane per rank."""
    lanes = tuple(Lane.of(rank, order) for rank, order in sorted(orders.items()))
    return Schedule(
        name="made", num_stages=len(placement), num_microbatches=microbatches, placement=placement, lanes=lanes
    )


def known_deadlock(microbatches: int) -> Schedule:
    """Two ranks of two stages; rank 1 keeps its last backward of stage 3 until stage 1's are done.

    With 6 micro-batches it runs; with 7 rank 1 has one gradient too many under way.
    """
    every = range(microbatches)
    first = [
        Action(stage, kind, item) for stage, kind in ((0, Kind.F), (2, Kind.F), (2, Kind.B), (0, Kind.B))
        for item in every
    ]  # fmt: skip
    second = [Action(stage, Kind.F, item) for stage in (1, 3) for item in every]
    second += [Action(stage, Kind.B, item) for stage in (3, 1) for item in every[:-1]]
    second += [Action(stage, Kind.B, microbatches - 1) for stage in (3, 1)]
    return made({0: first, 1: second}, ((0,), (1,), (0,), (1,)), microbatches)


def generated(stages: int, microbatches: int) -> Iterator[tuple[str, Schedule]]:
    """Every order that the generators make of so many stages and micro-batches."""
    for name in SCHEDULES:
        if name == "interleaved":
            continue
        schedule = make_schedule(name, stages, microbatches)
        yield name, schedule
        if schedule.concurrency == "none":
            yield f"{name} with recomputation", with_recompute(schedule)
            yield f"{name} with optimizer step", with_update(schedule)
    for virtual in (size for size in range(1, stages + 1) if stages % size == 0):
        yield (
            f"interleaved {stages // virtual}x{virtual}",
            interleaved(stages // virtual, microbatches, virtual=virtual),
        )
    for caps in itertools.product(range(1, min(4, microbatches) + 1), repeat=stages):
        yield f"1f1b {caps}", capped(stages, microbatches, caps)
        if list(caps) == sorted(caps, reverse=True) and caps[-1] >= 1:
            yield f"zb {caps}", make_schedule("zb", stages, microbatches, caps=caps)
    for replicas in itertools.product((1, 2, 3), repeat=stages):
        if max(replicas) > 1 and max(replicas) <= microbatches:
            for name in ("gpipe", "1f1b-sno", "1f1b-so", "zb-h1", "zb-h2"):
                if name.startswith("zb") and len(set(replicas)) > 1:
                    continue
                yield f"{name} {replicas}", make_schedule(name, stages, microbatches, replicas=replicas)
    if stages == 1:
        yield from ((f"data-parallel {count}", data_parallel(count, microbatches)) for count in range(1, 5))


def _ordered(stages: tuple[int, ...], microbatches: int) -> Iterator[list[Action]]:
    """Every order of a rank's forwards and backwards in which each forward comes before its backward."""
    actions = [(stage, item) for stage in stages for item in range(microbatches)]

    def extend(order: list[Action], state: tuple[int, ...]) -> Iterator[list[Action]]:
        if all(done == 2 for done in state):
            yield list(order)
        for index, done in enumerate(state):
            if done < 2:
                order.append(Action(actions[index][0], (Kind.F, Kind.B)[done], actions[index][1]))
                yield from extend(order, (*state[:index], done + 1, *state[index + 1 :]))
                order.pop()

    return extend([], (0,) * len(actions))


def all_orders(placement: tuple[tuple[int, ...], ...], microbatches: int) -> Iterator[Schedule]:
    """Every schedule of stages without replicas on these ranks, those that deadlock too."""
    ranks = 1 + max(rank for (rank,) in placement)
    own = [tuple(stage for stage, (rank,) in enumerate(placement) if rank == one) for one in range(ranks)]
    for orders in itertools.product(*(list(_ordered(stages, microbatches)) for stages in own)):
        yield made(dict(enumerate(orders)), placement, microbatches)


def random_order(seed: int, *, most_stages: int = 4, most_microbatches: int = 14) -> Schedule:
    """An order that is right as long as sends do not block: stages on any ranks, some of them replicated; ranks
    take turns and run some of what one stage has ready, few or many. Some backwards are split."""
    chance = random.Random(seed)
    stages = chance.randint(2, most_stages)
    ranks = chance.randint(2, stages)
    placement = [(stage if stage < ranks else chance.randrange(ranks),) for stage in range(stages)]
    chance.shuffle(placement)
    if chance.random() < 0.3:
        chosen = chance.randrange(stages)
        placement[chosen] = (placement[chosen][0], ranks)
    microbatches = chance.randint(2, most_microbatches)
    split = {stage for stage in range(stages) if chance.random() < 0.3}
    total = 1 + max(rank for where in placement for rank in where)
    done: set[tuple[Kind, int, int]] = set()
    left = {
        (kind, stage, item)
        for stage in range(stages)
        for kind in ((Kind.F, Kind.I, Kind.W) if stage in split else (Kind.F, Kind.B))
        for item in range(microbatches)
    }
    orders: dict[int, list[Action]] = {rank: [] for rank in range(total)}

    def back(stage: int, item: int) -> bool:
        return (Kind.B, stage, item) in done or (Kind.I, stage, item) in done

    def can_run(kind: Kind, stage: int, item: int) -> bool:
        if kind == Kind.F:
            return stage == 0 or (Kind.F, stage - 1, item) in done
        if kind == Kind.W:
            return (Kind.I, stage, item) in done
        return (Kind.F, stage, item) in done and (stage == stages - 1 or back(stage + 1, item))

    while left:
        rank = chance.randrange(total)
        ready = sorted(
            item for item in left if placement[item[1]][item[2] % len(placement[item[1]])] == rank
            and can_run(*item)
        )  # fmt: skip
        if not ready:
            continue
        kind, stage, _ = chance.choice(ready)
        burst = [item for item in ready if item[:2] == (kind, stage)][: chance.choice((1, 3, microbatches))]
        left.difference_update(burst)
        done.update(burst)
        orders[rank] += [Action(stage, kind, item) for _, _, item in burst]
    return made(orders, tuple(placement), microbatches)

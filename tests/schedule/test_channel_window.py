"""The checker's verdict on orders is what the runtime's own channel ends do with them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="the ends of channels need torch: pip install bapipe[torch]")

from bapipe.errors import DeadlockError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.schedule.channel_window import evaluation_order, stops_at
from bapipe.schedule.generators import make_schedule
from bapipe.schedule.v_shape import V_SHAPED
from bapipe.schedule.validate import check, require_valid
from bapipe.torch.comm.channel import P2PChannel
from bapipe.torch.comm.p2p_queues import Inbox, Outbox


class StuckError(Exception):
    """All ranks wait."""


class Memory:
    """A transport within one process that knows when every rank waits. A message is delivered when its receive is
    posted."""

    name = "memory"

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._live = ranks
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._stuck = False
        self._sent: dict[P2PChannel, int] = {}
        self._posted: dict[P2PChannel, int] = {}

    def wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting[threading.get_ident()] = ready
            while not ready():
                self._look()
                if self._stuck:
                    raise StuckError
                self._changed.wait()
            del self._waiting[threading.get_ident()]

    def _look(self) -> None:
        if len(self._waiting) == self._live and not any(ready() for ready in self._waiting.values()):
            self._stuck = True
            self._changed.notify_all()

    def ended(self) -> None:
        with self._changed:
            self._live -= 1
            self._look()
            self._changed.notify_all()

    def send(self, channel: P2PChannel, _: Sequence[Any]) -> Callable[[], None]:
        with self._changed:
            place = self._sent[channel] = self._sent.get(channel, 0) + 1
            self._changed.notify_all()
        return lambda: self.wait(lambda: self._posted.get(channel, 0) >= place)

    def receive(self, channel: P2PChannel, _: Any) -> Callable[[], tuple[Any, ...]]:
        with self._changed:
            place = self._posted[channel] = self._posted.get(channel, 0) + 1
            self._changed.notify_all()

        def wait() -> tuple[Any, ...]:
            self.wait(lambda: self._sent.get(channel, 0) >= place)
            return ()

        return wait

    def close(self) -> None:
        """Nothing is held."""


def ends_of(schedule: Schedule, action: Action, way: int) -> tuple[P2PChannel, bool] | None:
    """The channel that an action takes from (-1) or sends to (+1), and whether that stays on its rank."""
    if action.kind not in (Kind.F, Kind.B, Kind.I) or action.microbatch is None:
        return None
    onward = action.kind == Kind.F
    other = action.stage + (way if onward else -way)
    if not 0 <= other < schedule.num_stages:
        return None
    here, there = (schedule.rank_of(stage, action.microbatch) for stage in (action.stage, other))
    ends = (here, there) if way > 0 else (there, here)
    boundary = min(action.stage, other)
    return P2PChannel(boundary=boundary, onward=onward, from_rank=ends[0], to_rank=ends[1]), here == there


def runs(schedule: Schedule, orders: dict[int, list[Action]], *, training: bool) -> bool:
    """Whether the ranks get to their end: threads with the runtime's channel ends, used as the executor does."""
    memory = Memory(len(orders))
    coming: dict[P2PChannel, list[int]] = {}
    for order in orders.values():
        for action in order:
            target = ends_of(schedule, action, 1)
            if target is not None and not target[1] and action.microbatch is not None:
                coming.setdefault(target[0], []).append(action.microbatch)
    started, stuck = threading.Barrier(len(orders)), []

    def rank_of(rank: int, order: list[Action]) -> None:
        inboxes = {channel: Inbox(memory, channel) for channel in coming if channel.to_rank == rank}
        outboxes = {channel: Outbox(memory, channel) for channel in coming if channel.from_rank == rank}
        for channel, inbox in inboxes.items():
            inbox.begin(coming[channel], dict.fromkeys(coming[channel], ()))
        for channel, outbox in outboxes.items():
            outbox.begin(answered=training and channel.onward and channel.reverse in coming)
        started.wait()
        try:
            for action in order:
                assert action.microbatch is not None
                source, target = ends_of(schedule, action, -1), ends_of(schedule, action, 1)
                if source is not None and not source[1]:
                    inboxes[source[0]].take(action.microbatch)
                    if not source[0].onward and source[0].reverse in outboxes:
                        outboxes[source[0].reverse].release(action.microbatch)
                if target is not None and not target[1]:
                    outboxes[target[0]].send(action.microbatch, ())
            for outbox in outboxes.values():
                outbox.flush()
        except StuckError:
            stuck.append(rank)
        else:
            memory.ended()

    threads = [threading.Thread(target=rank_of, args=item, daemon=True) for item in orders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "neither ended nor stuck"
    return not stuck


def order_of(schedule: Schedule) -> dict[int, list[Action]]:
    return {lane.rank: list(lane) for lane in schedule.lanes}


def two_by_two(microbatches: int) -> Schedule:
    """Ranks of two stages each; rank 1 keeps its last backward of stage 3 until stage 1's are done."""
    every = range(microbatches)
    first = [Action(stage, kind, m) for stage, kind in ((0, "F"), (2, "F"), (2, "B"), (0, "B")) for m in every]
    second = [Action(stage, kind, m) for stage, kind in ((1, "F"), (3, "F")) for m in every]
    second += [Action(stage, "B", m) for stage in (3, 1) for m in every[:-1]]
    second += [Action(stage, "B", microbatches - 1) for stage in (3, 1)]
    return made({0: first, 1: second}, ((0,), (1,), (0,), (1,)), microbatches)


def made(orders: dict[int, list[Action]], placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    kinds = {kind.name: kind for kind in Kind}
    lanes = tuple(
        Lane.of(rank, [Action(a.stage, kinds.get(str(a.kind), a.kind), a.microbatch) for a in order])
        for rank, order in sorted(orders.items())
    )
    return Schedule(
        name="made", num_stages=len(placement), num_microbatches=microbatches, placement=placement, lanes=lanes
    )


def random_order(seed: int) -> Schedule:
    """An order that is right as long as sends do not block: ranks take turns, and run some of what one stage has
    ready, few or many."""
    chosen = random.Random(seed)
    ranks = chosen.randint(2, 3)
    stages = ranks * chosen.randint(1, 3)
    microbatches = chosen.randint(6, 14)
    placement = tuple((stage % ranks,) for stage in range(stages))
    done: set[tuple[str, int, int]] = set()
    left = {(kind, stage, m) for kind in "FB" for stage in range(stages) for m in range(microbatches)}
    orders: dict[int, list[Action]] = {rank: [] for rank in range(ranks)}

    def can_run(kind: str, stage: int, m: int) -> bool:
        if kind == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        return ("F", stage, m) in done and (stage == stages - 1 or ("B", stage + 1, m) in done)

    while left:
        rank = chosen.randrange(ranks)
        ready = sorted(item for item in left if item[1] % ranks == rank and can_run(*item))
        if not ready:
            continue
        kind, stage, _ = chosen.choice(ready)
        burst = [item for item in ready if item[:2] == (kind, stage)][: chosen.choice((1, 3, microbatches))]
        left.difference_update(burst)
        done.update(burst)
        orders[rank] += [Action(stage, Kind[kind], m) for _, _, m in burst]
    return made(orders, placement, microbatches)


def test_six_micro_batches_pass_and_seven_deadlock() -> None:
    for microbatches, passes in ((6, True), (7, False), (9, False)):
        schedule = two_by_two(microbatches)
        assert not check(schedule), "without a bound all are right"
        assert (not check(schedule, sends="windowed")) == passes
        assert runs(schedule, order_of(schedule), training=True) == passes
    with pytest.raises(DeadlockError, match=r"rank 0: 2B6 waits for ever .*rank 0 at 2B6, rank 1 at 1B5"):
        require_valid(two_by_two(7), sends="windowed")


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_verdict_is_what_the_channels_do(first: int) -> None:
    """Random orders, in training and as the same rank would evaluate."""
    for seed in range(first, first + 50):
        schedule = random_order(seed)
        assert not check(schedule)
        assert (not stops_at(schedule)) == runs(schedule, order_of(schedule), training=True), seed
        assert runs(schedule, evaluation_order(schedule), training=False), seed


def test_both_verdicts_are_among_the_random_orders() -> None:
    verdicts = {bool(stops_at(random_order(seed))) for seed in range(200)}
    assert verdicts == {True, False}


@pytest.mark.parametrize("name", ["1f1b-sno", "1f1b-so", "gpipe", "interleaved", "zb-h1", "zb-h2", *V_SHAPED])
def test_our_own_orders_never_stop(name: str) -> None:
    for ranks, microbatches in ((2, 3), (3, 12), (4, 16), (8, 32)):
        schedule = make_schedule(name, ranks, microbatches)
        assert not check(schedule, sends="windowed")
        compute = {rank: [] for rank in range(schedule.num_ranks)}
        for lane in schedule.lanes:
            compute[lane.rank] += [action for action in lane if action.kind in (Kind.F, Kind.B, Kind.I)]
        assert runs(schedule, compute, training=True)


def test_an_evaluation_takes_another_order_where_that_of_training_would_stop() -> None:
    """All forwards of a stage before the next one's: without gradients to answer them, few may be under way."""
    every = range(20)
    first = [Action(stage, "F", m) for stage in (0, 2) for m in every]
    second = [Action(stage, "F", m) for stage in (1, 3) for m in every]
    backward = [[Action(stage, "B", m) for stage in stages for m in every] for stages in ((2, 0), (3, 1))]
    schedule = made({0: first + backward[0], 1: second + backward[1]}, ((0,), (1,), (0,), (1,)), 20)
    forwards = {lane.rank: [action for action in lane if action.kind == Kind.F] for lane in schedule.lanes}
    assert not runs(schedule, forwards, training=False)
    assert evaluation_order(schedule) != forwards
    assert runs(schedule, evaluation_order(schedule), training=False)

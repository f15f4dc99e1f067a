"""(Schedule, Costs, Network) -> Timeline: what a schedule takes on given hardware, without running it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.engine import Engine, TaskTimes, time_tasks
from bapipe.errors import BaPipeError, DeadlockError
from bapipe.lowering import BACKWARD_MESSAGE, FORWARD_MESSAGE, Lowered, Network, lower, lower_blocking
from bapipe.schedule.actions import Kind, Schedule
from bapipe.timeline import Timeline, Transfers

__all__ = ["Costs", "simulate", "steady_period"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What each stage's actions and each boundary's transfers take, per micro-batch."""

    forward: tuple[float, ...]
    """seconds, one per stage"""
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    """what crosses from stage i to i+1, one per boundary: seconds, or bytes where the network has rates"""
    send_backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    recompute: tuple[float, ...]
    all_reduce: tuple[float, ...]
    """seconds per mini-batch, one per stage"""
    update: tuple[float, ...]

    @classmethod
    def of(
        cls,
        num_stages: int,
        *,
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        transfer: float | Sequence[float] = 0.0,
        transfer_backward: float | Sequence[float] | None = None,
        weight_gradient: float | Sequence[float] | None = None,
        recompute: float | Sequence[float] | None = None,
        all_reduce: float | Sequence[float] = 0.0,
        update: float | Sequence[float] = 0.0,
    ) -> Costs:
        """Costs from one value for all or one per stage (transfers: per boundary).

        Unless given apart, errors are as large as activations, half of the backward is the weight gradient, and
        recomputing takes as long as the forward.
        """
        forwards = _spread(forward, num_stages, "forward time", "stage", positive=True)
        backwards = _spread(backward, num_stages, "backward time", "stage", positive=True)
        weights = (
            tuple(value / 2 for value in backwards)
            if weight_gradient is None
            else _spread(weight_gradient, num_stages, "weight-gradient time", "stage")
        )
        for total, part in zip(backwards, weights, strict=True):
            if part > total:
                raise BaPipeError(f"the weight gradient takes {part:g} of a backward of {total:g}; lower it")
        back = transfer if transfer_backward is None else transfer_backward
        return cls(
            forward=forwards,
            backward=backwards,
            send_forward=_spread(transfer, num_stages - 1, "transfer time", "link"),
            send_backward=_spread(back, num_stages - 1, "transfer time", "link"),
            input_gradient=tuple(b - w for b, w in zip(backwards, weights, strict=True)),
            weight_gradient=weights,
            recompute=forwards if recompute is None else _spread(recompute, num_stages, "recompute time", "stage"),
            all_reduce=_spread(all_reduce, num_stages, "all-reduce time", "stage"),
            update=_spread(update, num_stages, "update time", "stage"),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def uniform(self) -> bool:
        """Whether all stages and all transfers, both ways, are alike, as the closed forms assume."""
        sends = {*self.send_forward, *self.send_backward}
        return len(set(self.forward)) == len(set(self.backward)) == 1 and len(sends) <= 1

    @property
    def transfer(self) -> float:
        """The longest transfer."""
        return max((*self.send_forward, *self.send_backward), default=0.0)

    def split(self, parts: int) -> Costs:
        """Each stage cut into `parts` equal virtual stages, dealt round-robin as interleaving does.

        Stage c·N + r is part c of rank r; the wrap from the last rank to the first costs the longest transfer.
        """
        wrap_forward, wrap_backward = (
            max(sends, default=0.0) for sends in (self.send_forward, self.send_backward)
        )

        def dealt(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value / parts for value in values) * parts

        def joined(sends: tuple[float, ...], wrap: float) -> tuple[float, ...]:
            return ((*sends, wrap) * parts)[:-1]

        return Costs(
            forward=dealt(self.forward),
            backward=dealt(self.backward),
            send_forward=joined(self.send_forward, wrap_forward),
            send_backward=joined(self.send_backward, wrap_backward),
            input_gradient=dealt(self.input_gradient),
            weight_gradient=dealt(self.weight_gradient),
            recompute=dealt(self.recompute),
            all_reduce=dealt(self.all_reduce),
            update=dealt(self.update),
        )


def _spread(
    value: float | Sequence[float], count: int, what: str, per: str, *, positive: bool = False
) -> tuple[float, ...]:
    values = [float(value)] * count if isinstance(value, (int, float)) else [float(item) for item in value]
    if len(values) == 1 and count != 1:
        values *= count
    if len(values) != count:
        raise BaPipeError(
            f"{what}: {count} {per}{'s' if count != 1 else ''} need one value or {count}, got {len(values)}"
        )
    for item in values:
        if not math.isfinite(item) or item < 0 or (positive and item == 0):
            bound = "more than 0" if positive else "at least 0"
            raise BaPipeError(f"{what} must be a finite number of {bound}, got {item:g}")
    return tuple(values)


def simulate(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    engine: Engine = "auto",
    lowered: Lowered | None = None,
) -> Timeline:
    """Time every action of the schedule.

    Linear in the number of actions. Raises DeadlockError naming a rank and the action it waits at.
    `lowered` saves lowering again a schedule that is simulated often with different costs.
    """
    if costs.num_stages != schedule.num_stages:
        raise BaPipeError(f"the schedule has {schedule.num_stages} stages but the costs are of {costs.num_stages}")
    network = network or Network()
    if lowered is None:
        blocking = network.sending == "blocking"
        lowered = lower_blocking(schedule, network) if blocking else lower(schedule, network)
    work, duration = _durations(schedule, costs, lowered)
    if schedule.concurrency == "slots":
        times = _lockstep(schedule, costs, lowered, network)
    else:
        times = _free_running(schedule, costs, lowered, network, duration, engine)
        if times.done < len(duration):
            raise _deadlock(lowered, times)
    return _timeline(schedule, costs, lowered, network, times, work)


def _durations(schedule: Schedule, costs: Costs, lowered: Lowered) -> tuple[Floats, Floats]:
    """Per task: the work it does, and the time it holds its lane."""
    sends = [(*part, 0.0) for part in (costs.send_forward, costs.send_backward)]
    table = np.zeros((10, schedule.num_stages))
    for kind, values in (
        (Kind.F, costs.forward),
        (Kind.B, costs.backward),
        (Kind.I, costs.input_gradient),
        (Kind.W, costs.weight_gradient),
        (Kind.R, costs.recompute),
        (Kind.A, costs.all_reduce),
        (Kind.U, costs.update),
        (FORWARD_MESSAGE, sends[0]),
        (BACKWARD_MESSAGE, sends[1]),
    ):
        table[int(kind)] = values
    work: Floats = table[lowered.kinds, lowered.stages]
    if lowered.message_rate is not None and lowered.message_latency is not None:
        message = (lowered.kinds == FORWARD_MESSAGE) | (lowered.kinds == BACKWARD_MESSAGE)
        work = np.where(message, work * lowered.message_rate + lowered.message_latency, work)
    if schedule.concurrency != "static":
        return work, work
    # Each half of the compute units takes as long as both together take for forward and backward.
    whole = np.array(costs.forward) + np.array(costs.backward)
    both = (lowered.kinds == Kind.F) | (lowered.kinds == Kind.B)
    return work, np.where(both, whole[lowered.stages], work)


def _sent_amounts(costs: Costs, lowered: Lowered) -> Floats:
    """Per edge: what it sends, in the network's unit."""
    onward = np.array((*costs.send_forward, 0.0))
    back = np.array((0.0, *costs.send_backward))
    source = lowered.edge_source
    stage = lowered.stages[source]
    amounts: Floats = np.where(lowered.kinds[source] == Kind.F, onward[stage], back[stage])
    return np.where(lowered.graph.edge_link >= 0, amounts, 0.0)


def _free_running(
    schedule: Schedule,
    costs: Costs,
    lowered: Lowered,
    network: Network,
    duration: Floats,
    engine: Engine,
) -> TaskTimes:
    sending = network.sending or schedule.sending
    seconds = _sent_amounts(costs, lowered) * lowered.edge_rate
    occupy, latency = seconds, lowered.edge_latency
    if network.latency_only:
        occupy, latency = np.zeros(len(seconds)), seconds + lowered.edge_latency
    return time_tasks(
        lowered.graph,
        duration=duration,
        edge_occupy=occupy,
        edge_latency=latency,
        cut_through=np.full(len(duration), sending == "cut-through"),
        engine=engine,
    )


def _lockstep(schedule: Schedule, costs: Costs, lowered: Lowered, network: Network) -> TaskTimes:
    """FBP's table slots: F(m,i) in slot m+i, B(m,i) in slot m+2N−1−i (from 0), all ranks in step.

    A slot costs the longest F+B active on one rank, or one transfer if that is longer.
    """
    N, M = schedule.num_stages, schedule.num_microbatches
    forward = lowered.kinds == Kind.F
    slot = lowered.microbatches + np.where(forward, lowered.stages, 2 * N - 1 - lowered.stages)
    load = np.zeros((M + 2 * N - 1, N))
    work = np.where(forward, np.array(costs.forward)[lowered.stages], np.array(costs.backward)[lowered.stages])
    np.add.at(load, (slot, lowered.stages), work)
    pairs = [*zip(costs.send_forward, costs.send_backward, strict=True)]
    if network.duplex == "full":
        transfer = max((max(pair) for pair in pairs), default=0.0)
    elif network.duplex == "half":
        transfer = max((sum(pair) for pair in pairs), default=0.0)
    else:
        transfer = sum(sum(pair) for pair in pairs)
    edges = np.concatenate([[0.0], np.cumsum(np.maximum(load.max(axis=1), transfer))])
    start, end = edges[slot], edges[slot + 1]
    remote = np.where(forward, lowered.stages < N - 1, lowered.stages > 0)
    return TaskTimes(
        start=start,
        end=end,
        sent=np.where(remote, start, np.nan),
        arrival=np.where(remote, end, np.nan),
        done=len(start),
    )


def _deadlock(lowered: Lowered, times: TaskTimes) -> DeadlockError:
    waiting = []
    starts = lowered.graph.lane_start
    for low, high in itertools.pairwise(starts):
        stuck = next((task for task in range(int(low), int(high)) if np.isnan(times.start[task])), None)
        if stuck is not None and lowered.kinds[stuck] <= Kind.U:
            microbatch = int(lowered.microbatches[stuck])
            name = f"{lowered.stages[stuck]}{Kind(int(lowered.kinds[stuck])).name}"
            waiting.append(f"rank {lowered.ranks[stuck]} at {name}{'' if microbatch < 0 else microbatch}")
    where = ", ".join(waiting[:4]) + (" …" if len(waiting) > 4 else "")
    return DeadlockError(f"deadlock: {where or 'an exchange'} wait for ever; reorder these actions")


def _timeline(
    schedule: Schedule, costs: Costs, lowered: Lowered, network: Network, times: TaskTimes, work: Floats
) -> Timeline:
    action = lowered.kinds <= Kind.U
    if lowered.message_to is None:
        source = np.flatnonzero(~np.isnan(times.sent))
        target = np.full(len(lowered.kinds), -1, np.int64)
        over_link = lowered.graph.edge_link >= 0
        target[lowered.edge_source[over_link]] = lowered.ranks[lowered.graph.edge_to[over_link]]
        transfers = Transfers(
            source=source, to_rank=target[source], start=times.sent[source], arrival=times.arrival[source]
        )
    else:
        transfers = _message_transfers(lowered, times, action)
    period = None if schedule.flushes else steady_period(schedule, costs, network)
    return Timeline(
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        kinds=lowered.kinds[action],
        stages=lowered.stages[action],
        microbatches=lowered.microbatches[action],
        ranks=lowered.ranks[action],
        lanes=lowered.lanes[action],
        start=times.start[action],
        end=times.end[action],
        work=work[action],
        transfers=transfers,
        period=period,
    )


def _message_transfers(lowered: Lowered, times: TaskTimes, action: NDArray[np.bool_]) -> Transfers:
    assert lowered.message_to is not None
    position = np.cumsum(action) - 1
    made = {
        (int(lowered.kinds[task]) == Kind.F, int(lowered.stages[task]), int(lowered.microbatches[task])): task
        for task in np.flatnonzero(np.isin(lowered.kinds, (Kind.F, Kind.B, Kind.I)))
    }
    messages = np.flatnonzero((lowered.kinds == FORWARD_MESSAGE) | (lowered.kinds == BACKWARD_MESSAGE))
    sources = []
    for task in messages:
        onward = int(lowered.kinds[task]) == FORWARD_MESSAGE
        stage = int(lowered.stages[task]) + (0 if onward else 1)
        sources.append(position[made[onward, stage, int(lowered.microbatches[task])]])
    return Transfers(
        source=np.array(sources, dtype=np.int64),
        to_rank=lowered.message_to[messages],
        start=times.start[messages],
        arrival=times.end[messages],
    )


def steady_period(schedule: Schedule, costs: Costs, network: Network | None = None) -> float:
    """λ: time per micro-batch of an endless capped 1F1B pipeline without replicas; reached, not only a bound.

    λ = max of every stage's F+B, every link's time, and over i<j of the loop through stages i..j:
    [Σ(F+B) + Σ(SF+SB)] / (K_i − K_j + 1). A denominator of 0 or less is a deadlock. Cost: O(N²).
    """
    network = network or Network()
    if schedule.caps is None:
        raise BaPipeError(f"{schedule.name} has no caps, so it has no steady period; use a 1f1b schedule")
    N = schedule.num_stages
    work = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    sends_f, sends_b = [], []
    for stage in range(N - 1):
        ahead, behind = schedule.placement[stage][0], schedule.placement[stage + 1][0]
        out, back = network.route(ahead, behind), network.route(behind, ahead)
        sends_f.append(costs.send_forward[stage] * out.seconds_per_unit + out.latency)
        sends_b.append(costs.send_backward[stage] * back.seconds_per_unit + back.latency)
    period = max(work)
    if not network.latency_only:
        both = zip(sends_f, sends_b, strict=True)
        each = [f + b if network.duplex == "half" else max(f, b) for f, b in both]
        period = max([period, *([sum(sends_f) + sum(sends_b)] if network.duplex == "shared" else each)])
    for i in range(N):
        loop = work[i]
        for j in range(i + 1, N):
            loop += work[j] + sends_f[j - 1] + sends_b[j - 1]
            turns = schedule.caps[i] - schedule.caps[j] + 1
            if turns <= 0:
                raise DeadlockError(
                    f"stage {i} may hold {schedule.caps[i]} micro-batches but stage {j} wants "
                    f"{schedule.caps[j]} before its first backward; raise the cap of stage {i}"
                )
            period = max(period, loop / turns)
    return period

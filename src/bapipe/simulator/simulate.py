"""(Schedule, Costs, Network) -> Timeline: what a schedule takes on given hardware, without running it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.actions import Kind, Schedule
from bapipe.simulator.engine import Engine, TaskTimes, time_tasks
from bapipe.simulator.lowering import EXCHANGE, Lowered, Network, lower
from bapipe.simulator.timeline import Timeline, Transfers

__all__ = ["Costs", "ReplicaCosts", "cost_places", "seconds_by_place", "simulate", "steady_period"]

Floats = NDArray[np.float64]


_BY_KIND = (
    (Kind.F, "forward"),
    (Kind.B, "backward"),
    (Kind.I, "input_gradient"),
    (Kind.W, "weight_gradient"),
    (Kind.R, "recompute"),
    (Kind.U, "update"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCosts:
    """Seconds of one replica of a stage, where they are not alike; the fields mean what they mean in `Costs`."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    recompute: float
    update: float


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
    """seconds per global batch, one per stage"""
    update: tuple[float, ...]
    replicas: tuple[tuple[ReplicaCosts, ...], ...] | None = None
    """for each stage what each of its replicas takes, in place of the above; empty where they are alike, None
    where all are"""
    unanswered: tuple[int, ...] = ()
    """boundaries over which no gradient comes back, because nothing before them is trained: the backward of the
    stage before waits for nothing"""

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

    def folded(self) -> Costs:
        """Each stage cut in two equal ones, placed in a V: stages r and 2N−1−r are the halves of rank r.

        What crosses between two ranks takes as long on the way up as on the way down; at the turn nothing is sent.
        """

        def halved(values: tuple[float, ...]) -> tuple[float, ...]:
            halves = tuple(value / 2 for value in values)
            return (*halves, *reversed(halves))

        def mirrored(sends: tuple[float, ...]) -> tuple[float, ...]:
            return (*sends, 0.0, *reversed(sends))

        return Costs(
            forward=halved(self.forward),
            backward=halved(self.backward),
            send_forward=mirrored(self.send_forward),
            send_backward=mirrored(self.send_backward),
            input_gradient=halved(self.input_gradient),
            weight_gradient=halved(self.weight_gradient),
            recompute=halved(self.recompute),
            all_reduce=halved(self.all_reduce),
            update=halved(self.update),
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
        if item != 0 and not 1e-100 <= item <= 1e100:
            raise BaPipeError(f"{what} must lie between 1e-100 and 1e100, got {item:g}; choose another unit")
    return tuple(values)


def simulate(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    engine: Engine = "auto",
) -> Timeline:
    """Time every action of the schedule.

    Linear in the number of actions. Raises DeadlockError naming a rank and the action it waits at.
    """
    if costs.num_stages != schedule.num_stages:
        raise BaPipeError(f"the schedule has {schedule.num_stages} stages but the costs are of {costs.num_stages}")
    network = network or Network()
    if network.sending == "blocking" and schedule.concurrency != "none":
        raise BaPipeError(f"{schedule.name} runs F and B at once, so it cannot block on sends; choose other links")
    lowered = lower(schedule, network, costs.unanswered)
    work, duration = _durations(schedule, costs, lowered)
    if schedule.concurrency == "slots":
        times = _lockstep(schedule, costs, lowered, network, work)
    else:
        times = _free_running(schedule, costs, lowered, network, duration, engine)
        if times.done < len(duration):
            raise _deadlock(lowered, times)
    return _timeline(schedule, costs, lowered, network, times, work)


def _durations(schedule: Schedule, costs: Costs, lowered: Lowered) -> tuple[Floats, Floats]:
    """Per task: the work it does, and the time it holds its lane."""
    seconds = seconds_by_place(costs)
    table = np.zeros((EXCHANGE + 1, len(seconds[int(Kind.F)])))
    for kind, values in seconds.items():
        table[kind] = values
    work: Floats = table[lowered.kinds, cost_places(schedule, costs, lowered)]
    if lowered.first_message is not None:
        work[lowered.first_message :] = _channel_seconds(costs, lowered) + _channel_latency(lowered)
    if schedule.concurrency != "static":
        return work, work
    # Each half of the compute units takes as long as both together take for forward and backward.
    whole = np.array(costs.forward) + np.array(costs.backward)
    both = (lowered.kinds == Kind.F) | (lowered.kinds == Kind.B)
    return work, np.where(both, whole[lowered.stages], work)


def cost_places(schedule: Schedule, costs: Costs, lowered: Lowered) -> NDArray[np.int64]:
    """For each task, where `seconds_by_place` has what it takes: its stage, or behind all stages its replica."""
    if costs.replicas is None:
        return lowered.stages
    places, place = lowered.stages.copy(), schedule.num_stages
    for stage, own in enumerate(costs.replicas):
        for rank in schedule.placement[stage][: len(own)]:
            places[(lowered.stages == stage) & (lowered.ranks == rank)] = place
            place += 1
    return places


def seconds_by_place(costs: Costs) -> dict[int, list[float]]:
    """By kind of action, seconds of every stage, and behind them of every replica of stages whose are unlike."""
    single = [(stage, item) for stage, own in enumerate(costs.replicas or ()) for item in own]
    found = {
        int(kind): [*getattr(costs, name), *(getattr(item, name) for _, item in single)] for kind, name in _BY_KIND
    }
    found[int(Kind.A)] = [*costs.all_reduce, *(costs.all_reduce[stage] for stage, _ in single)]
    return found


def _channel_seconds(costs: Costs, lowered: Lowered) -> Floats:
    """How long one micro-batch holds each channel."""
    return np.array(
        [
            (costs.send_forward if channel.onward else costs.send_backward)[channel.boundary] * channel.rate
            for channel in lowered.channels
        ]
    )


def _channel_latency(lowered: Lowered) -> Floats:
    return np.array([channel.latency for channel in lowered.channels])


def _channel_times(costs: Costs, lowered: Lowered, network: Network) -> tuple[Floats, Floats]:
    """How long a transfer holds each channel, and how much later it arrives."""
    occupy, latency = _channel_seconds(costs, lowered), _channel_latency(lowered)
    return (np.zeros(len(occupy)), occupy + latency) if network.latency_only else (occupy, latency)


def _uplink_seconds(costs: Costs, lowered: Lowered) -> Floats:
    """How long one micro-batch holds each uplink of each channel."""
    return np.array(
        [
            (costs.send_forward if channel.onward else costs.send_backward)[channel.boundary] * rate
            for channel in lowered.channels
            for _, rate in channel.uplinks
        ],
        dtype=np.float64,
    )


def _free_running(
    schedule: Schedule,
    costs: Costs,
    lowered: Lowered,
    network: Network,
    duration: Floats,
    engine: Engine,
) -> TaskTimes:
    occupy, latency = _channel_times(costs, lowered, network)
    return time_tasks(
        lowered.graph,
        duration=duration,
        occupy=occupy,
        latency=latency,
        uplink_occupy=None if network.latency_only else _uplink_seconds(costs, lowered),
        cut_through=(network.sending or schedule.sending) == "cut-through",
        engine=engine,
    )


def _lockstep(schedule: Schedule, costs: Costs, lowered: Lowered, network: Network, work: Floats) -> TaskTimes:
    """FBP's table slots: F(m,i) in slot m+i, B(m,i) in slot m+2N−1−i (from 0), all ranks in step.

    A slot costs the longest work active on one rank, or all that crosses the busiest link if that takes longer (it
    adds up if links send after the compute). Updates follow the last slot.
    """
    N, M = schedule.num_stages, schedule.num_microbatches
    forward, last = lowered.kinds == Kind.F, np.isin(lowered.kinds, (Kind.A, Kind.U))
    slot = lowered.microbatches + np.where(forward, lowered.stages, 2 * N - 1 - lowered.stages)
    load = np.zeros((M + 2 * N - 1, N))
    np.add.at(load, (slot[~last], lowered.stages[~last]), work[~last])
    occupy, latency = _channel_times(costs, lowered, network)
    link = lowered.graph.channel_link
    transfer = float((np.bincount(link, occupy)[link] + latency).max()) if len(link) else 0.0
    if len(lowered.graph.uplink) and not network.latency_only:
        transfer = max(transfer, float(np.bincount(lowered.graph.uplink, _uplink_seconds(costs, lowered)).max()))
    compute = load.max(axis=1)
    after = (network.sending or schedule.sending) == "after-compute"
    edges = np.concatenate([[0.0], np.cumsum(compute + transfer if after else np.maximum(compute, transfer))])
    start, end = edges[slot], edges[slot + 1]
    start[last] = edges[-1]
    end[last] = edges[-1] + work[last]
    sends = lowered.graph.channel >= 0
    return TaskTimes(
        start=start,
        end=end,
        sent=np.where(sends, start, np.nan),
        arrival=np.where(sends, end, np.nan),
        done=len(start),
    )


def _deadlock(lowered: Lowered, times: TaskTimes) -> DeadlockError:
    waiting = []
    starts = lowered.graph.lane_start
    for low, high in itertools.pairwise(starts):
        waits = np.isnan(times.end[low:high]) & (lowered.kinds[low:high] <= Kind.U)
        if waits.any():
            stuck = int(low) + int(np.argmax(waits))
            microbatch = int(lowered.microbatches[stuck])
            name = f"{lowered.stages[stuck]}{Kind(int(lowered.kinds[stuck])).name}"
            waiting.append(f"rank {lowered.ranks[stuck]} at {name}{'' if microbatch < 0 else microbatch}")
    where = ", ".join(waiting[:4]) + (" …" if len(waiting) > 4 else "")
    how = "reorder these actions" if lowered.first_message is None else "use links that do not block, or reorder"
    return DeadlockError(f"deadlock: {where} wait for ever; {how}")


def _timeline(
    schedule: Schedule, costs: Costs, lowered: Lowered, network: Network, times: TaskTimes, work: Floats
) -> Timeline:
    action: slice | NDArray[np.bool_] = slice(None)
    sent, arrived = times.sent[lowered.senders], times.arrival[lowered.senders]
    if lowered.first_message is not None:
        action = lowered.kinds <= Kind.U
        sent, arrived = times.start[lowered.first_message :], times.end[lowered.first_message :]
    transfers = Transfers(source=lowered.senders, to_rank=lowered.receiving_ranks, start=sent, arrival=arrived)
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


def steady_period(schedule: Schedule, costs: Costs, network: Network | None = None) -> float:
    """λ: time per micro-batch of an endless capped 1F1B pipeline without replicas.

    λ = max of every stage's F+B, every link's time, and over i<j of the loop through stages i..j:
    [Σ(F+B) + Σ(SF+SB)] / (K_i − K_j + 1), where on cut-through links only what outlasts the compute counts. No
    loop goes through a boundary over which no gradient comes back. It is reached, not only a bound, where every
    direction has a link of its own. A denominator of 0 or less is a deadlock. Cost: O(N²).
    """
    network = network or Network()
    sending = network.sending or schedule.sending
    if schedule.caps is None:
        raise BaPipeError(f"{schedule.name} has no caps, so it has no steady period; use a 1f1b schedule")
    if sending == "blocking":
        raise BaPipeError(f"{schedule.name} has no known steady period with blocking sends; choose other links")
    N = schedule.num_stages
    work = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    busy: dict[Hashable, float] = {}
    exposed = []
    for stage in range(N - 1):
        ahead, behind = schedule.placement[stage][0], schedule.placement[stage + 1][0]
        between = 0.0
        for ends, amount, compute in (
            ((ahead, behind), costs.send_forward[stage], costs.forward[stage]),
            ((behind, ahead), costs.send_backward[stage], costs.backward[stage + 1]),
        ):
            route, link = network.route(*ends), network.link(*ends)
            seconds = amount * route.seconds_per_unit
            busy[link] = busy.get(link, 0.0) + seconds
            for uplink, rate in route.uplinks:
                busy[uplink] = busy.get(uplink, 0.0) + amount * rate
            hidden = compute if sending == "cut-through" else 0.0
            between += max(0.0, seconds + route.latency - hidden)
        exposed.append(between)
    period = max(work)
    if not network.latency_only:
        period = max(period, *busy.values(), 0.0)
    caps = np.array([min(cap, 2**53) for cap in schedule.caps])
    steps = np.array(work[1:]) + np.array(exposed)
    for i in range(N - 1):
        last = next((boundary for boundary in sorted(costs.unanswered) if boundary >= i), N - 1)
        loops = np.cumsum(np.concatenate([[work[i]], steps[i:last]]))[1:]
        turns = caps[i] - caps[i + 1 : last + 1] + 1
        if not len(turns):
            continue
        if turns.min() <= 0:
            j = i + 1 + int(np.argmax(turns <= 0))
            raise DeadlockError(
                f"stage {i} may hold {schedule.caps[i]} micro-batches but stage {j} wants "
                f"{schedule.caps[j]} before its first backward; raise the cap of stage {i}"
            )
        period = max(period, float((loops / turns).max()))
    return period

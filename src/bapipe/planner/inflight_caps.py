"""K of every stage by its times and memory: the least that hides transfers; how long weight gradients wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.costs.stage_time import StageSeconds, stage_seconds
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.inflight import full_overlap_caps, never_rising, stage_caps, weight_gradient_delays

__all__ = ["InflightBytes", "inflight_bytes", "least_caps", "weight_delays"]

_MANY = 2**30
"""micro-batches: no bound"""


def least_caps(chain: Chain, stages: Sequence[StageChoice], microbatches: int, hardware: Hardware) -> list[int]:
    """The least K_i with which no transfer delays the stages (`full_overlap_caps`), as far as memory allows.

    Never less than 1F1B-SNO's, one for every accelerator from the stage on.
    """
    cluster = hardware.cluster
    counts, seconds = [len(stage.accelerators) for stage in stages], _first_replicas(chain, stages, hardware)
    again = np.array([stage.recompute for stage in stages])
    forward = (seconds.forward / counts).tolist()
    backward = ((seconds.backward + again * seconds.forward) / counts).tolist()
    most = [_most_inflight(chain, stage, hardware) * count for stage, count in zip(stages, counts, strict=True)]
    links = [
        cluster.link(one.accelerators[-1], other.accelerators[0]) for one, other in itertools.pairwise(stages)
    ]
    sends, returns = [], []
    for stage, link in zip(stages[:-1], links, strict=True):
        sends.append(float(chain.boundary_forward[stage.last]) / link.bandwidth + link.latency)
        returns.append(float(chain.return_seconds(link.bandwidth, link.latency)[stage.last]))
    wanted = full_overlap_caps(forward, backward, sends, returns)
    least = stage_caps("1f1b", counts, microbatches)
    return never_rising(
        [
            max(min(max(cap, own), room, microbatches), min(own, microbatches), 1)
            for cap, own, room in zip(wanted, least, most, strict=True)
        ]
    )


def _most_inflight(chain: Chain, stage: StageChoice, hardware: Hardware) -> int:
    """Micro-batches that one replica of the stage has memory for, beside its weights."""
    found = inflight_bytes(chain, stage, hardware)
    return _MANY if found.each <= 0 else int(max(0.0, min(_MANY, found.room // found.each)))


def weight_delays(
    chain: Chain,
    stages: Sequence[StageChoice],
    caps: Sequence[int],
    hardware: Hardware,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[int]:
    """By how many micro-batches each stage of a zero-bubble order defers its weight gradients.

    So many that it holds as many micro-batches as the first stage, as far as its memory allows beside K_i; none
    where it has next to no weight gradients.
    """
    delays, seconds = [], _first_replicas(chain, stages, hardware)
    pays = (seconds.weight_gradient >= tuning.worth_deferring * seconds.work).tolist()
    for stage, cap, delay, worth in zip(stages, caps, weight_gradient_delays(caps), pays, strict=True):
        wanted = delay if worth else 0
        found = inflight_bytes(chain, stage, hardware)
        spare = found.room - cap * found.each
        room = wanted if found.delayed <= 0 else int(max(0.0, min(wanted, spare // found.delayed)))
        delays.append(room)
    return delays


def _first_replicas(chain: Chain, stages: Sequence[StageChoice], hardware: Hardware) -> StageSeconds:
    """What the stages take on the first of their accelerators."""
    types = [(chain.row(hardware.cluster.accelerators[stage.accelerators[0]].type),) for stage in stages]
    return stage_seconds(chain, [(stage.first, stage.last) for stage in stages], types)


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightBytes:
    """What the micro-batches of a stage may take."""

    each: float
    """bytes of one that waits for its backward"""
    delayed: float
    """bytes of one that waits for its weight gradient"""
    room: float
    """what one replica has for all of them"""


def inflight_bytes(chain: Chain, stage: StageChoice, hardware: Hardware) -> InflightBytes:
    """Of one stage, beside its weights, gradients, optimizer state, messages under way and workspace."""
    needed = stage_bytes(chain, stage.first, stage.last)
    capacity = min(hardware.cluster.type_of(index).memory for index in stage.accelerators)
    return InflightBytes(
        each=needed.each(recompute=stage.recompute),
        delayed=needed.delayed,
        room=capacity - needed.fixed(hardware.static_copies(), recompute=stage.recompute),
    )

"""K of every stage: how many micro-batches 1F1B keeps live, as asked for, or the least that hides transfers.

And how long weight gradients may wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import stage_bytes
from bapipe.costs.stage_time import StageSeconds, stage_seconds
from bapipe.planner.evaluate import Hardware, StageChoice
from bapipe.schedule.generators import full_overlap_caps

__all__ = ["WORTH_WAITING", "LiveBytes", "declining_caps", "least_caps", "live_bytes", "weight_delays"]

WORTH_WAITING = 0.01
"""share of a stage's work that its weight gradients must be for it to pay to put them off"""


def declining_caps(first: int, replicas: Sequence[int], microbatches: int) -> list[int]:
    """K_i where only the first stage's K is given: evenly down to 1 at the last stage, rounded up.

    K_i = 1 + ⌈(K − 1)(N − i)/(N − 1)⌉, from 1: with K = N that is 1F1B-SNO, and where every stage and transfer is
    alike, `full_overlap_caps` lies on such a line. With replicas, ranks are counted instead of stages, and each
    replica of a stage holds at least one. No K exceeds the micro-batches, and none that of the stage before it.
    """
    behind = [sum(replicas[stage:]) for stage in range(len(replicas))]
    last, whole = replicas[-1], behind[0] - replicas[-1]
    caps = []
    for own, ranks in zip(replicas, behind, strict=True):
        cap = last - (last - first) * (ranks - last) // whole if whole else first
        caps.append(max(min(max(cap, own), microbatches), 1))
    for index in range(len(caps) - 2, -1, -1):
        caps[index] = max(caps[index], caps[index + 1])
    return caps


def least_caps(chain: Chain, stages: Sequence[StageChoice], microbatches: int, hardware: Hardware) -> list[int]:
    """The least K_i with which no transfer delays the stages (`full_overlap_caps`), as far as memory allows.

    Never less than 1F1B-SNO's, one for every accelerator from the stage on.
    """
    cluster = hardware.cluster
    counts, seconds = [len(stage.accelerators) for stage in stages], _first_replicas(chain, stages, hardware)
    again = np.array([stage.recompute for stage in stages])
    forward = (seconds.forward / counts).tolist()
    backward = ((seconds.backward + again * seconds.forward) / counts).tolist()
    most = [_most_live(chain, stage, hardware) * count for stage, count in zip(stages, counts, strict=True)]
    links = [
        cluster.link(one.accelerators[-1], other.accelerators[0]) for one, other in itertools.pairwise(stages)
    ]
    sends = [
        [
            float(sizes[stage.last]) / link.bandwidth + link.latency
            for stage, link in zip(stages[:-1], links, strict=True)
        ]
        for sizes in (chain.boundary_forward, chain.boundary_backward)
    ]
    wanted = full_overlap_caps(forward, backward, *sends)
    caps = []
    for index, cap in enumerate(wanted):
        behind = sum(counts[index:])
        caps.append(max(min(max(cap, behind), most[index], microbatches), min(behind, microbatches), 1))
    for index in range(len(caps) - 2, -1, -1):
        caps[index] = max(caps[index], caps[index + 1])
    return caps


def _most_live(chain: Chain, stage: StageChoice, hardware: Hardware) -> int:
    """Micro-batches that one replica of the stage has memory for, beside its weights."""
    found = live_bytes(chain, stage, hardware)
    return 2**30 if found.each <= 0 else max(0, int(found.room // found.each))


def weight_delays(
    chain: Chain, stages: Sequence[StageChoice], caps: Sequence[int], hardware: Hardware
) -> list[int]:
    """By how many micro-batches each stage of a zero-bubble order puts its weight gradients off.

    So many that it holds as many micro-batches as the first stage, as far as its memory allows beside K_i; none
    where it has next to no weight gradients.
    """
    delays, seconds = [], _first_replicas(chain, stages, hardware)
    pays = (seconds.weight_gradient >= WORTH_WAITING * seconds.work).tolist()
    for stage, cap, worth in zip(stages, caps, pays, strict=True):
        wanted = max(0, caps[0] - cap) if worth else 0
        found = live_bytes(chain, stage, hardware)
        spare = found.room - cap * found.each
        delays.append(min(wanted, max(0, int(spare // found.delayed)) if found.delayed > 0 else wanted))
    return delays


def _first_replicas(chain: Chain, stages: Sequence[StageChoice], hardware: Hardware) -> StageSeconds:
    """What the stages take on the first of their accelerators."""
    types = [(chain.row(hardware.cluster.accelerators[stage.accelerators[0]].type),) for stage in stages]
    return stage_seconds(chain, [(stage.first, stage.last) for stage in stages], types)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """What the micro-batches of a stage may take."""

    each: float
    """bytes of one that waits for its backward"""
    delayed: float
    """bytes of one that waits for its weight gradient"""
    room: float
    """what one replica has for all of them"""


def live_bytes(chain: Chain, stage: StageChoice, hardware: Hardware) -> LiveBytes:
    """Of one stage, beside its weights, gradients, optimizer state, messages under way and workspace."""
    needed = stage_bytes(chain, stage.first, stage.last)
    each = needed.kept if stage.recompute else needed.stash
    room = min(hardware.cluster.type_of(index).memory for index in stage.accelerators)
    room -= needed.weights * hardware.static_copies() + needed.buffers + needed.workspace
    room -= needed.stash if stage.recompute else 0.0
    return LiveBytes(each=each, delayed=needed.delayed, room=room)

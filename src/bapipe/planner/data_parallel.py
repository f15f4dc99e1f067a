"""Data parallelism: plain and accumulated as candidates; ZeRO-1, FSDP and tensor slicing by formula."""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import UnitBytes
from bapipe.costs.stage_time import stage_seconds
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import DDP_BUCKET
from bapipe.planner.gradient_rings import all_reduce
from bapipe.planner.stage_dealing import dealing_by_speed, dealt_words
from bapipe.schedule.generators import capped

__all__ = [
    "Estimate",
    "analytic_alternatives",
    "at_global_batch",
    "data_parallel_candidate",
    "dealt_data_parallel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A way of training that BaPipe does not run, by formula."""

    name: str
    time: float
    """seconds per global batch"""
    memory: float
    """bytes on the fullest accelerator"""
    capacity: float


def data_parallel_candidate(chain: Chain, hardware: Hardware, accumulation: int) -> Candidate:
    """Every accelerator holds the whole model and runs `accumulation` micro-batches per optimizer step."""
    count = len(hardware.cluster)
    stage = StageChoice(first=0, last=len(chain) - 1, accelerators=tuple(range(count)))
    label = "data parallelism" + (f", {accumulation} accumulation steps" if accumulation > 1 else "")
    schedule = capped(1, count * accumulation, [count], name="data-parallel", replicas=[count])
    return Candidate(label=label, chain=chain, stages=(stage,), schedule=schedule)


def dealt_data_parallel(chain: Chain, hardware: Hardware, global_batch: int) -> Candidate | None:
    """Data parallelism whose micro-batches are dealt by speed; None where that is in turn, or some take none."""
    microbatches, rest = divmod(global_batch, chain.microbatch)
    count = len(hardware.cluster)
    stage = StageChoice(first=0, last=len(chain) - 1, accelerators=tuple(range(count)))
    dealing = dealing_by_speed(chain, stage, hardware.cluster, microbatches)
    if rest or not dealing or len(set(dealing)) < count:
        return None
    schedule = capped(1, microbatches, [1], name="data-parallel", replicas=[count], dealing=[dealing])
    label = f"data parallelism, micro-batches {dealt_words(schedule)}"
    return Candidate(label=label, chain=chain, stages=(stage,), schedule=schedule)


def at_global_batch(chain: Chain, hardware: Hardware, global_batch: int) -> Candidate | None:
    """Data parallelism with one optimizer step per global batch; None where its micro-batches do not divide it."""
    steps, rest = divmod(global_batch, chain.microbatch * len(hardware.cluster))
    return data_parallel_candidate(chain, hardware, steps) if steps and not rest else None


def analytic_alternatives(chain: Chain, hardware: Hardware, microbatches: int) -> list[Estimate]:
    """ZeRO-1, FSDP and tensor slicing at the same global batch of `microbatches` micro-batches.

    ZeRO-1 moves as much as data parallelism and shards the optimizer state. FSDP gathers the weights for every
    forward and backward and scatters the gradients, and shards everything. Tensor slicing divides every layer
    N ways and all-reduces each boundary forward and backward (Megatron's two of each a block are more). Compute
    is as slow as the slowest accelerator's; nothing overlaps but the gradient traffic of ZeRO-1 and FSDP.
    """
    cluster = hardware.cluster
    count = len(cluster)
    rows = {chain.row(item.type) for item in cluster.accelerators}
    seconds = stage_seconds(chain, [(0, len(chain) - 1)], [rows])
    whole, backward, update = (float(item[0]) for item in (seconds.work, seconds.backward, seconds.update))
    units = UnitBytes.of(chain)
    weights, trained = float(units.weights.sum()), float(units.trained.sum())
    members = tuple(range(count))
    capacity = min(cluster.type_of(index).memory for index in members)
    state = hardware.static_copies() - 2
    each = -(-microbatches // count)
    ring = all_reduce(cluster, members)
    reduce = ring.seconds(trained)
    largest = float(units.weights.max())
    exposed = max(ring.seconds(min(DDP_BUCKET, trained)), reduce - backward)
    gathers = (ring.seconds(weights) + 0.5 * reduce) * each
    boundary = sum(
        ring.seconds(float(forward)) + ring.seconds(float(back))
        for forward, back in zip(chain.boundary_forward, chain.boundary_backward, strict=True)
    )

    def memory(copies: float, frozen: float = 1.0) -> float:
        """With so many copies of what is trained, and such a share of what is frozen."""
        return units.held(0, len(chain) - 1, copies, 1) - (1 - frozen) * (weights - trained)

    return [
        Estimate(
            name="ZeRO-1 (by formula)",
            time=each * whole + exposed + update / count,
            memory=memory(2 + state / count),
            capacity=capacity,
        ),
        Estimate(
            name="FSDP (by formula)",
            time=max(each * whole, gathers) + ring.seconds(largest) + update / count,
            memory=memory((2 + state) / count, 1 / count) + 2 * largest,
            capacity=capacity,
        ),
        Estimate(
            name="tensor slicing (by formula)",
            time=microbatches * (whole / count + boundary) + update / count,
            memory=memory((2 + state) / count, 1 / count),
            capacity=capacity,
        ),
    ]

"""Where the ranks run: slices of one GPU, or, in a rehearsal, processes on this CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.records.plan import Plan
from bapipe.torch import slices
from bapipe.torch.profiler.detect_machine import usable_memory

__all__ = ["MEMORY", "Machine", "slices_of"]

MEMORY = 16e9
"""bytes of a slice"""
_NAMES = {"cuda": "h200", "cpu": "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One rank per share of a GPU. On a CPU all ranks are equal: the shares are only planned with."""

    device: Literal["cuda", "cpu"]
    shares: tuple[float, ...]
    """%"""
    memory: float = MEMORY
    """bytes of each rank, CUDA's own included; a CPU process has as much for its tensors only where `limited`"""
    limited: bool = False
    """whether a CPU process is kept to its memory, as every slice is"""

    def __len__(self) -> int:
        return len(self.shares)

    @property
    def room(self) -> float:
        """Bytes of each rank that a plan may count on."""
        return usable_memory(self.memory) if self.device == "cuda" else self.memory

    def start(self) -> slices.Slices | None:
        """Cut the GPU; None where there is nothing to cut."""
        return slices.start(self.shares, memory=self.memory) if self.device == "cuda" else None

    def stop(self) -> None:
        """Nothing is left of it; ranks must have ended before."""
        if self.device == "cuda":
            slices.stop()

    def type_name(self, share: float) -> str:
        """The accelerator type of such a share, as profiles have it."""
        return f"{_NAMES[self.device]}-{share:g}pct"

    def cluster(
        self, links: dict[str, float], *, shares: tuple[float, ...] | None = None, memory: float | None = None
    ) -> Cluster:
        """The ranks, with the links as measured; `shares` and `memory` are what to believe of them instead.

        An all-reduce is planned at the rate it has beside compute.
        """
        shares = shares or self.shares
        types = {
            self.type_name(share): AcceleratorType(
                name=self.type_name(share),
                kind="gpu" if self.device == "cuda" else "cpu",
                flops={"fp32": 64e12 * share / 100},
                memory=self.room if memory is None else memory,
                memory_bandwidth=4.3e12 * share / 100,
                execution="synchronous",
            )
            for share in shares
        }
        return Cluster(
            name=f"one H200 in {len(self)} slices" if self.device == "cuda" else f"{len(self)} CPU processes",
            accelerators=tuple(
                Accelerator(name=f"localhost/{i}", type=self.type_name(share), node="localhost")
                for i, share in enumerate(shares)
            ),
            types=types,
            within=Link(bandwidth=links["bandwidth"], latency=links["latency"]),
            collective_bandwidth=links["all_reduce"],
            collective_overlap=min(1.0, links["all_reduce_loaded"] / links["all_reduce"]),
        )


def slices_of(plan: Plan) -> list[int]:
    """The slice of each of the plan's ranks: a plan may leave some out, and have unequal ones in any order."""
    return [int(name.rpartition("/")[2]) for name in plan.ranks]

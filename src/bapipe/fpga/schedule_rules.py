"""Rule: what a schedule makes of a stage's compute, its activations in flight and its transfers.

Both schedules of Table I run all boards in step: one period P per micro-batch, of which the forward takes the
share φ that it has of the network's work. 1f1b-as changes between forward and backward and drains the chain of
resident layers each time; fbp-as streams on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bapipe.hardware.cluster import Link
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import fbp_as, one_f_one_b_as
from bapipe.schedule.inflight import inflight_microbatches

__all__ = ["FPGA_SCHEDULES", "Rule"]

FPGA_SCHEDULES = ("1f1b-as", "fbp-as")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One schedule at one micro-batch size."""

    schedule: Literal["1f1b-as", "fbp-as"]
    microbatch: int
    """images"""
    global_batch: int
    """images"""
    forward_share: float
    """φ"""
    refill: float = 1.0
    """share of the fill δ that a change between forward and backward costs (1f1b-as)"""

    @property
    def microbatches(self) -> int:
        return self.global_batch // self.microbatch

    def images(self, behind: int) -> int:
        """Images in flight at a stage with so many boards from it to the end: b · min(M, K) with K of Table I."""
        return self.microbatch * inflight_microbatches(self.schedule, behind, self.microbatches)

    def slots(self, fill: Any) -> Any:
        """Image times of compute in a period: b, and for 1f1b-as the fill of the layer pipeline δ on top."""
        extra = self.refill * fill if self.schedule == "1f1b-as" else 0.0 * fill
        return self.microbatch + extra

    def transfer(self, forward: Any, backward: Any, link: Link) -> Any:
        """Seconds that a link is busy in a period, with `forward` and `backward` bytes per image."""
        b = self.microbatch
        both = b * (forward + backward) / link.bandwidth
        busy = both if link.duplex == "half" else b * np.maximum(forward, backward) / link.bandwidth
        return busy + link.latency * (both > 0)

    def link_period(self, forward: Any, backward: Any, link: Link) -> Any:
        """The least period in which a cut's transfers hide behind compute.

        fbp-as sends both ways all the time: 2a/(F+B) in all. 1f1b-as has only F for the activations and B for the
        errors: a/F (Table I, "Bandwidth").
        """
        busy = self.transfer(forward, backward, link)
        if self.schedule == "fbp-as":
            return busy
        b, share = self.microbatch, self.forward_share
        each = np.maximum(b * forward / share, b * backward / (1 - share)) / link.bandwidth
        return np.maximum(busy, each + link.latency * (each > 0))

    def head_start(self, index: int, period: float) -> float:
        """Seconds before the last backward ends that a stage, from 0, may begin its optimizer step.

        Under 1f1b-as the last backward travels from the last stage to the first; fbp-as steps after all slots.
        """
        if self.schedule != "1f1b-as" or index == 0:
            return 0.0
        return index * (1 - self.forward_share) * period

    def time(self, period: float, stages: int, *, transfer: float = 0.0, update: float = 0.0) -> float:
        """Seconds per global batch: (M+N−1)·P of Table I and what of the optimizer steps no head start hides.

        In fbp-as the first and last N slots have only forward or only backward to hide the longest transfer
        behind; that excess is the simulator's, too.
        """
        M, N, share = self.microbatches, stages, self.forward_share
        if self.schedule == "1f1b-as":
            return (M + N - 1) * period + update
        ends = max(share * period, transfer) + max((1 - share) * period, transfer)
        return (M - 1) * period + N * ends + update

    def order(self, stages: int) -> Schedule:
        """The schedule itself."""
        make = one_f_one_b_as if self.schedule == "1f1b-as" else fbp_as
        return make(stages, self.microbatches)

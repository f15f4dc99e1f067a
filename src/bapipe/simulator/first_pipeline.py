"""One of several alike pipelines in a timeline, to be drawn alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bapipe.simulator.timeline import Timeline, Transfers

__all__ = ["first_copy"]


def first_copy(timeline: Timeline, copies: int) -> Timeline:
    """Of the timeline of so many copies, as `replicated_pipelines` numbers their ranks, that of the first."""
    kept = np.flatnonzero(timeline.ranks % copies == 0)
    place = np.full(len(timeline.ranks), -1, np.int64)
    place[kept] = np.arange(len(kept))
    moved = timeline.transfers
    own = np.flatnonzero(place[moved.source] >= 0)
    microbatches = timeline.microbatches[kept]
    return replace(
        timeline,
        num_ranks=timeline.num_ranks // copies,
        num_microbatches=timeline.num_microbatches // copies,
        microbatches=np.where(microbatches < 0, -1, microbatches // copies),
        ranks=timeline.ranks[kept] // copies,
        transfers=Transfers(
            source=place[moved.source[own]],
            to_rank=moved.to_rank[own] // copies,
            start=moved.start[own],
            arrival=moved.arrival[own],
        ),
        **{name: getattr(timeline, name)[kept] for name in ("kinds", "stages", "lanes", "start", "end", "work")},
    )

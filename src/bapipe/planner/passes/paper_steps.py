"""Pass: the paper's exploration, recorded for `--explain` and the report."""

from __future__ import annotations

from dataclasses import replace

from bapipe.planner.passes.choose_sizes import choose_sizes
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.state import SearchState

__all__ = ["record_paper_steps"]


def record_paper_steps(state: SearchState) -> None:
    """Add the steps of the best partition that the paper's rules make; the plan itself does not change.

    Where the plan came about by them already, those are they. Else the paper's partitions, which may split layers,
    are tried at every micro-batch size on the segments that are there.
    """
    if not state.explain:
        return
    state.paper_steps = state.best.candidate.steps
    if state.paper_steps:
        return
    paper = state.narrowed(replace(state.request, strategy="bapipe", schedule=None), sizes=state.sizes)
    for run in (choose_sizes, try_sizes, reorder_pipelines):
        run(paper)
    steps = (evaluation.candidate.steps for evaluation in paper.incumbents.ranked())
    state.paper_steps = next((own for own in steps if own), ())

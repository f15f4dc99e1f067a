"""How the planner works: its passes, in order. Each reads the search's state and adds to it."""

from __future__ import annotations

from collections.abc import Callable

from bapipe.planner.passes.choose_sizes import choose_sizes
from bapipe.planner.passes.copy_parts import copy_parts
from bapipe.planner.passes.deal_pipelines import deal_pipelines
from bapipe.planner.passes.estimates import estimate_alternatives
from bapipe.planner.passes.move_actions import move_actions
from bapipe.planner.passes.paper_steps import record_paper_steps
from bapipe.planner.passes.recompute_layers import recompute_layers
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.replicate import replicate_pipelines
from bapipe.planner.passes.require_plan import require_plan
from bapipe.planner.passes.search_cuts import search_cuts
from bapipe.planner.passes.share_states import share_states, try_engines
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.passes.weigh_errors import weigh_errors
from bapipe.planner.state import SearchState

__all__ = ["PASSES"]

PASSES: tuple[Callable[[SearchState], None], ...] = (
    choose_sizes,  # the micro-batch sizes to search
    try_sizes,  # at each, data parallelism and under each schedule every partition: the best of every family
    reorder_pipelines,  # zero-bubble orders made for the best pipelines' times
    replicate_pipelines,  # PP × DP of pipelines that are planned for a share of the accelerators
    deal_pipelines,  # on a mixed cluster, pipelines of one type each that take micro-batches by their speed
    copy_parts,  # on a large one, copies of a plan that is searched for a part of it, on as many parts as it pays
    search_cuts,  # what only the simulator finds: cuts, orders of accelerators, replicas, in-flight counts
    move_actions,  # quicker orders of the best pipelines, one action moved at a time
    recompute_layers,  # where memory lacks, the layers whose forward is repeated
    share_states,  # ZeRO-1: the same with optimizer states shared by the replicas of a stage
    try_engines,  # data parallelism as torch's DDP and FSDP2 run it
    require_plan,  # from here on something fits; else says what would help
    weigh_errors,  # where times are known with an error: ranges, and the plan that loses least by it
    estimate_alternatives,  # tensor slicing by formula
    record_paper_steps,  # the paper's exploration, where it is to be explained
)

"""The planner's tuned constants: where it trades planning time, or memory, for a faster plan.

None of them is a rule of the cost model. Larger limits make the search try more; thresholds say which differences
are worth acting on. They were chosen by the plans and planning times of benchmarks/planner.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_TUNING", "Tuning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How much the search tries, and which differences count."""

    thorough_size: int = 5_000
    """layers · accelerators up to which the exact strategy tries every micro-batch size, the baselines'
    partitions, replicas under every schedule and PP × DP, and where times are known with an error the partitions
    of scenarios and other orders of accelerator types"""
    whole_actions: int = 120_000
    """accelerators · micro-batches up to which a cluster beyond that is also searched as one pipeline, and a part
    of it as a cluster of its own"""
    whole_mixed: int = 16
    """accelerators of several types up to which a cluster is not divided, unless it is beyond `thorough_size`"""
    whole_lacking: int = 8
    """accelerators up to which one is not divided because what is fastest lacks memory"""
    worth_dividing: float = 0.05
    """share of the time that perfect use of a mixed cluster must save for it to be divided into mixed parts"""
    searched_parts: int = 2
    """sizes of a part of such a cluster that are searched as clusters of their own, the best by an outline; the
    smallest that fits always is"""
    near_copies: float = 1.2
    """times the best outline's time up to which they are: outlines have neither V shapes nor single layers that
    recompute"""
    searched_depths: int = 3
    """depths of pipelines of one type each that are searched on a mixed cluster, the best by an outline"""
    beside_depth: float = 1.25
    """times as deep, or as shallow, that such pipelines may be to be compared by what they leave over"""
    more_idle: float = 0.02
    """share of the cluster's speed that one of these may leave over beyond another"""
    dealing_rounds: int = 3
    """times that their micro-batches are dealt anew by what the simulator says of the last dealing"""
    dealt_ranks: int = 128
    """ranks of one copy of such pipelines, at most"""
    dealt_plans: int = 2
    """plans of one depth and micro-batch size that such pipelines run, each of another schedule"""
    near_part: float = 1.1
    """times the best outline's time up to which they are"""
    part_sizes: int = 2
    """micro-batch sizes that they are searched at"""
    slower_parts: int = 2
    """sizes of a part in a row that are outlined without being faster than smaller ones"""
    most_types: int = 3
    """accelerator types that the exact partition orders freely; with more, the cluster's own order is kept"""
    memory_retries: int = 5
    """times that the exact partition is solved again with less memory where its answer turns out not to fit"""
    kept_schedule_size: int = 100_000
    """stages · micro-batches up to which a schedule is kept for the next candidate of its shape"""

    pipedream_layers: int = 64
    """layers up to which the exact strategy also tries PipeDream's own dynamic programme"""
    pipedream_accelerators: int = 16
    """accelerators up to which it does"""

    as_fast: float = 5e-4
    """share of the throughput by which two plans may differ and count as equally fast: no prediction is closer"""
    engine_worth: float = 0.01
    """share of the best plan's time that one with ZeRO-1, or of torch's DDP or FSDP2, must save to be the plan: a
    prediction does not tell less apart, and more is sent or another engine runs it"""
    near_best: float = 1.15
    """times the best plan's time up to which a hybrid is simulated, and a pipeline gets an order of its own"""

    hybrids_simulated: int = 12
    """balanced hybrids per micro-batch size that are simulated, the best by the formula"""
    three_stage_accelerators: int = 16
    """accelerators up to which balanced hybrids may have three stages"""
    replicated_pipelines: int = 10
    """pipelines per number of replicas that PP × DP replicates, each of another schedule"""

    worth_deferring: float = 0.01
    """share of a stage's work that its weight gradients must be for it to pay to defer them"""
    reordered_pipelines: int = 3
    """pipelines whose stages get a zero-bubble order made for their times"""
    order_size: int = 512
    """stages · micro-batches up to which such orders are made: each takes milliseconds"""
    layer_orders: int = 60
    """orders that are made in one search for better cuts between layers"""
    slice_orders: int = 200
    """orders that are made in one search for better cuts between slices of layers"""
    orders_simulated: int = 6
    """orders of one partition that are simulated, the shortest ones"""
    order_spare_memory: float = 0.05
    """share of the memory that such an order leaves free: it fills whatever it may, for little gain, and a stage's
    memory is not known more closely"""
    order_gain: float = 1e-4
    """share of the time that moving a cut must save"""
    order_worth_memory: float = 5e-3
    """share of the time that such an order must save to replace zb's usual one, which mostly holds less memory"""

    slices: int = 16
    """parts in which a layer is tried split: a stage's share of it is a multiple of 1/16, or of a channel"""
    split_limits: int = 6
    """limits of the longest stage that are tried where parts of layers cost more than their share"""

    near_errors: float = 2.0
    """times the error of layers and links together by which a candidate may be slower than the best and is weighed
    against it under scenarios"""
    kept_cuts: int = 3
    """candidates of each family, micro-batch size and depth that are kept for that"""
    moved_candidates: int = 6
    """candidates near the best of which those with one cut moved, or two accelerators swapped, are added"""
    searched_scenarios: int = 12
    """random scenarios that are searched by simulation, so that what is best in each is weighed"""
    edge_errors: float = 2.0
    """standard errors by which links are slower and faster in the scenarios that are searched besides"""
    scenario_search_steps: int = 15_000
    """actions that the search of one scenario may time, as `search_steps` counts them"""
    scenario_starts: int = 4
    """candidates from which the search of a scenario starts, the fastest in it"""
    scenario_bests: int = 3
    """plans of different families that are kept of each, the fastest in it"""
    screened_candidates: int = 100
    """candidates near the best that are timed in these scenarios, to choose those that are timed in more"""
    type_orders: int = 12
    """orders of the accelerator types along a pipeline that are tried for that"""
    ordered_pipelines: int = 4
    """of the pipelines in these orders, those that get a zero-bubble order made for their times"""
    sampled_orders: int = 8
    """scenarios for whose times zero-bubble orders are made"""
    varied_moves: int = 3
    """pipelines whose actions are moved to make them quicker in scenarios"""
    moved_scenarios: int = 5
    """scenarios in which that is done"""
    sampled_choices: int = 3
    """of the orders made for the predicted times, the rules that are tried for those of a scenario"""
    nearby_actions: int = 100_000
    """actions of added candidates that are simulated"""
    scenario_candidates: int = 32
    """candidates near the best that are timed in scenarios, beside the best of every family"""
    scenario_orders: int = 24
    """orders of the same stages, beside these, that are timed in scenarios"""
    scenarios: int = 100
    """scenarios, as far as `scenario_actions` goes"""
    fewest_scenarios: int = 20
    """scenarios at least; with fewer a 5th percentile says nothing"""
    scenario_actions: int = 4_000_000
    """actions of all candidates and scenarios that are timed"""
    level_regret: float = 1e-3
    """mean regret by which two plans may differ and count as equally good, so that the simpler is chosen"""
    race_gain: float = 1e-5
    """mean share of the time that one more plan in a race must save"""

    race_again_gain: float = 1e-3
    """mean share of the fastest raced time that one more plan must be expected to save in a further round"""

    v_order_actions: int = 5_000
    """actions of the orders that are made in one search for better cuts of a V-shaped pipeline"""
    order_move_actions: int = 40_000
    """actions of the orders that are simulated to find a quicker one by moving single actions"""
    moved_orders: int = 8
    """pipelines that a quicker order is looked for, the fastest of each schedule, micro-batch size and depth"""
    moved_on: int = 2
    """of these the fastest then, that one is looked for once more"""
    move_on_actions: int = 1_000_000
    """as `order_move_actions`, for each of those"""
    moves_worth_memory: float = 1e-3
    """share of the time that a quicker order must save to be taken where it holds more"""
    order_move_patience: int = 8
    """orders in a row that are gone on from without being quicker"""
    order_shuffles: int = 8
    """actions that are then moved at random, before the search goes on"""
    order_shuffle_loss: float = 2e-3
    """share of the time by which what came of that may be slower and is gone on from"""
    time_variations: int = 4
    """variations of the times of a V-shaped or interleaved pipeline's stages for which orders are made too"""
    varied_choices: int = 3
    """of the rules by which orders of an interleaved pipeline are made, those that are tried for such times"""
    looped_shapes: int = 8
    """numbers of stages per accelerator for which orders are made, those with the least bound"""
    looped_orders: int = 24
    """orders that are made in one search for better cuts of them"""
    looped_actions: int = 20_000
    """actions of these orders up to which more are made, where each has few"""
    justified_limits: tuple[float, ...] = (1.5, 3.0)
    """times the activations of interleaved 1F1B's warm-up that a justified order may hold; it is tried without
    such a limit as well"""
    cuts_save: float = 0.05
    """share of the time that moved cuts are taken to save at most: what is slower than the best by more is left"""
    fewer_ranks: int = 6
    """accelerators up to which interleaving, and layers that recompute, are tried on fewer of them too"""
    search_steps: int = 60_000
    """actions that the search by simulation may time, some hundred plans at once counting as one"""
    search_more: int = 20
    """times as much that high effort simulates and lists"""
    search_starts: int = 3
    """pipelines near which faster ones are looked for where there are too many to list"""
    recompute_share: float = 1.0
    """of a search's steps, what orders with recomputation may take at least, where plans without it did not fit"""
    layer_steps: int = 20_000_000
    """actions that the search for layers that recompute may time, where plans lack memory"""
    choice_steps: int = 100
    """actions that take as long to time as the layers of one rank to choose, by the square of how many it has"""
    layer_tables: int = 20_000_000
    """stages times layers squared of the pipelines that are cut for that at one micro-batch size"""
    layer_estimate: float = 0.98
    """share of the estimate of such a plan's time that it may be shorter by, since runs of layers spare more"""
    recompute_shapes: int = 500
    """ways to replicate stages times layers up to which all are tried with layers that recompute"""
    layer_starts: int = 3
    """plans with such layers near which faster ones are looked for"""
    search_gain: float = 2.5e-4
    """share of the time by which a plan must be faster to be worth weighing"""
    search_cases: int = 20_000
    """cuts and orders of accelerators of one micro-batch size that are listed"""
    shape_cases: int = 5_000
    """of one shape"""
    search_orders: int = 5_000
    """in-flight counts of one shape up to which all are tried"""
    replica_search_accelerators: int = 6
    """accelerators up to which every way to replicate stages is listed"""
    cases_together: int = 2_000
    """cases that are timed at once"""
    dealt_cases: int = 400
    """of an order whose replicas are of several types, cases whose micro-batches are dealt by their speed"""
    dealings: int = 8
    """dealings of one order that are tried, those of the cases that may be fastest"""
    dealing_moves: int = 32
    """steps by which the best plan's dealing is improved"""
    cases_as_one: int = 400
    """cases that take as long to time together as one does alone"""
    bound_steps: int = 4
    """actions that take as long to time as a stage takes to be bounded"""
    cases_weighed: int = 64
    """cases of one shape and order whose memory is weighed, from the fastest on"""


DEFAULT_TUNING = Tuning()
"""what the planner uses unless it is given another"""

"""What one simulated schedule comes to: the figures that `bapipe simulate` prints."""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.closed_forms import closed_form
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network
from bapipe.simulator.timeline import Timeline

__all__ = ["Summary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one schedule on given costs, in the unit of time of the costs."""

    schedule: str
    stages: int
    microbatches: int
    time: float
    """one global batch; for a pipeline that never flushes, M steady periods"""
    bubble: float
    peak_activations: list[float]
    """in-flight micro-batches at most, per accelerator (of its whole share where it holds several stages)"""
    bandwidth_demand: float
    """in boundaries' bytes per unit of time"""
    weights_memory: list[float]
    """weights and gradients in units of a stage's weights w; several versions for PipeDream"""
    closed_form: float | None
    closed_form_valid: bool
    closed_form_condition: str | None
    makespan: float
    span: float
    """the longest time from a rank's first action to its last"""
    period: float | None
    exposed_communication: list[float]
    """per accelerator: idle while its next input was on a link"""
    busy: list[float]
    caps: list[int] | None
    slots: str | None
    """how forward and backward share an accelerator under fbp-as: table or static"""


def summarise(schedule: Schedule, costs: Costs, timeline: Timeline, network: Network | None = None) -> Summary:
    """The figures of a simulated schedule."""
    plain = network is None or network in (Network(), Network(sending=schedule.sending))
    recomputes = any((lane.kinds == Kind.R).any() for lane in schedule.lanes)
    form = closed_form(schedule, costs) if plain and not recomputes else None
    versions = schedule.weight_versions or (1,) * schedule.num_ranks
    slots = {"none": None, "slots": "table", "static": "static"}[schedule.concurrency]
    return Summary(
        schedule=schedule.name,
        stages=schedule.num_stages,
        microbatches=schedule.num_microbatches,
        time=timeline.time,
        bubble=timeline.bubble,
        peak_activations=timeline.peak_activations(),
        bandwidth_demand=timeline.bandwidth_demand(),
        weights_memory=[float(count + 1) for count in versions],
        closed_form=form.time if form else None,
        closed_form_valid=form.valid if form else False,
        closed_form_condition=form.condition if form else None,
        makespan=timeline.makespan,
        span=max(timeline.spans()),
        period=timeline.period,
        exposed_communication=timeline.exposed_communication(),
        busy=timeline.busy(),
        caps=None if schedule.caps is None else list(schedule.caps),
        slots=slots,
    )

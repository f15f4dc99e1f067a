"""The paper's Tables I and II as formulas, with the range in which each is right.

Uniform stages only: N stages, M micro-batches, F and B per stage, SR per transfer, P = F + B. Outside a formula's
range, and for unequal stages, only the simulation is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs

__all__ = ["ClosedForm", "closed_form", "paper_table_row", "unified_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """A formula's value and whether the case lies in its range."""

    time: float
    valid: bool
    condition: str
    """the range, as a person reads it"""


_FEW_AHEAD = 3
"""d up to which a link with SR ≤ F+B keeps up with the forwards of 1F1B with caps 1 + d(N−i)"""


def unified_time(N: int, M: int, F: float, B: float, SR: float, *, d: int, k: int) -> float:
    """1F1B with caps K_i = k + d(N−i) on links that send after the compute.

    Exact for SR ≤ F+B if k = 1 and d ≤ 3, else for SR ≤ min(F, B): with more forwards ahead, transfers that take
    longer than a forward queue up. (d, k) = (1, 1) is Table II's 1F1B-SNO and (2, 2) its 1F1B-SO.
    """
    P = F + B
    stalls = max(0, (M - k) * (N - 1) // (d * (N - 1) + 1))
    return (M + N - 1) * P + 2 * (N - 1) * SR + max(0.0, 2 * SR - (d - 1) * P) * stalls


def _affine(caps: Sequence[int]) -> tuple[int, int] | None:
    """(d, k) of caps K_i = k + d(N−i), if they are of that form."""
    k = caps[-1]
    d = caps[-2] - k if len(caps) > 1 else 1
    fits = d >= 1 and all(cap == k + d * behind for behind, cap in enumerate(reversed(caps)))
    return (d, k) if fits else None


def closed_form(schedule: Schedule, costs: Costs) -> ClosedForm | None:
    """The formula for this schedule, or None where there is none (unequal stages, replicas, odd caps)."""
    if not costs.uniform or any(len(ranks) > 1 for ranks in schedule.placement):
        return None
    if any(costs.all_reduce) or any(costs.update):
        return None
    N, M = schedule.num_stages, schedule.num_microbatches
    F, B, SR = costs.forward[0], costs.backward[0], costs.transfer
    P = F + B
    name = schedule.name
    if name == "gpipe":
        time = (N - 1) * (P + 2 * SR) + P + (M - 1) * (max(F, SR) + max(B, SR)) if N > 1 else M * P
        return ClosedForm(time=time, valid=True, condition="always")
    if name in ("1f1b-as", "fbp-as"):
        if schedule.concurrency == "static":
            return ClosedForm(time=(M + 2 * N - 1) * P, valid=N == 1 or SR <= P, condition="SR <= F+B")
        return ClosedForm(time=(M + N - 1) * P, valid=N == 1 or min(F, B) >= SR, condition="SR <= min(F, B)")
    if name == "pipedream":
        return ClosedForm(time=M * (P + 2 * SR * (N - 1) / N), valid=True, condition="always (steady state)")
    if name == "interleaved":
        ranks = schedule.num_ranks
        work = (N // ranks) * P
        dealt = all(own == (stage % ranks,) for stage, own in enumerate(schedule.placement))
        valid = (SR == 0 or ranks == 1) and M % ranks == 0 and dealt and N % ranks == 0
        return ClosedForm(
            time=M * work + (ranks - 1) * P,
            valid=valid,
            condition="SR = 0, M a multiple of N, as many stages on every accelerator",
        )
    if name in ("zb-h1", "zb-h2"):
        return _zero_bubble(name, N, M, costs)
    if name == "zb-v":
        return _v_shaped(schedule.num_ranks, M, costs)
    return _capped(schedule, N, M, F, B, SR)


def _zero_bubble(name: str, N: int, M: int, costs: Costs) -> ClosedForm:
    F, SR = costs.forward[0], costs.transfer
    I, W = costs.input_gradient[0], costs.weight_gradient[0]  # noqa: E741
    work = M * (F + I + W)
    if name == "zb-h1":
        valid = N == 1 or (SR == 0 and min(F, I) >= W and M >= N)
        return ClosedForm(
            time=work + (N - 1) * (F + I - W), valid=valid, condition="SR = 0, W <= F, W <= I, M >= N"
        )
    # The bubble (N−1)(F+I−2W) is within each rank's span; the makespan adds the stagger of the ranks.
    valid = N == 1 or (SR == 0 and min(F, I) >= W and M >= 2 * N - 1)
    return ClosedForm(
        time=work + (N - 1) * max(F, F + I - 2 * W),
        valid=valid,
        condition="SR = 0, W <= F, W <= I, M >= 2N-1",
    )


def _v_shaped(ranks: int, M: int, costs: Costs) -> ClosedForm:
    """ZB-V: no bubble within a rank's span; each rank begins one forward of a stage after the one before."""
    F, I, W = costs.forward[0], costs.input_gradient[0], costs.weight_gradient[0]  # noqa: E741
    valid = ranks == 1 or (F == I == W and costs.transfer == 0 and 2 * ranks <= M + 1)
    return ClosedForm(
        time=2 * M * (F + I + W) + (ranks - 1) * F, valid=valid, condition="SR = 0, F = I = W, M >= 2N-1"
    )


def _capped(schedule: Schedule, N: int, M: int, F: float, B: float, SR: float) -> ClosedForm | None:
    form = _affine(schedule.caps) if schedule.caps is not None and schedule.sending == "after-compute" else None
    if form is None or not schedule.name.startswith("1f1b"):
        return None
    d, k = form
    most, condition = (F + B, "SR <= F+B") if k == 1 and d <= _FEW_AHEAD else (min(F, B), "SR <= min(F, B)")
    valid = N == 1 or most >= SR
    return ClosedForm(time=unified_time(N, M, F, B, SR, d=d, k=k), valid=valid, condition=condition)


def paper_table_row(name: str, N: int, M: int, F: float, B: float, SR: float) -> dict[str, object]:
    """The row of Table I or II for one schedule, as printed (saved activations without the min with M)."""
    doubled = name in ("fbp-as", "1f1b-so")
    if name in ("1f1b-as", "fbp-as"):
        time = (M + N - 1) * (F + B)
    elif name == "1f1b-sno":
        time = (M + N - 1) * (F + B) + (N + M - 2 - -(-(M - 1) // N)) * 2 * SR
    else:
        time = (M + N - 1) * (F + B) + (N - 1) * 2 * SR
    return {
        "time": time,
        "bubble": 1 - M * (F + B) / time,
        "activations": [(2 if doubled else 1) * (N - i + 1) for i in range(1, N + 1)],
        "weights": 2,
        "bandwidth": 2 / (F + B) if name == "fbp-as" else 1 / F,
    }

"""Stages as captured or compiled: which of the two a plan's stages run, where the profile has both.

Both are planned, each with the times and bytes that its layers were measured with, so that a split backward that
is dear when it is compiled counts against zero-bubble schedules there and not here. The faster plan is taken. How
long the compiler takes, once per run, is not in the step and decides only between plans that are as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import has_both_ways, of_way, way_words
from bapipe.costs.segments import Floats
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.request import ENGINES, Request
from bapipe.planner.search import Exploration, explore_way
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.units import format_seconds

__all__ = ["explore", "other_may_be_faster", "other_way_of", "way_note"]

_LEVEL = 0.05
"""of all pairs of scenarios, the share in which the other way must be as fast to be worth a run"""


def explore(
    profile: Profile,
    cluster: Cluster,
    request: Request | None = None,
    *,
    explain: bool = False,
    tuning: Tuning = DEFAULT_TUNING,
    progress: Callable[[str, float], None] | None = None,
) -> Exploration:
    """Find the fastest plan that fits; raises InfeasibleError saying what would help if none does.

    Where the profile has layers as captured and compiled, and the request leaves it open, both are planned and the
    faster plan is the best; `Exploration.other_way` is what the other came to. `explain` also records the steps of
    the paper's exploration. `progress` is called with what the search by simulation has found and what it may
    still gain, and the share of the effort that is spent.
    """
    request = request or Request()
    common: dict[str, Any] = {"explain": explain, "tuning": tuning, "progress": progress}

    def of(*, compiled: bool) -> Exploration:
        own = of_way(profile, compiled=compiled)
        return explore_way(own, cluster, _asked(request, own), **common)

    if request.compiled != "auto" or not has_both_ways(profile):
        return of(compiled=request.compiled is True)
    reason = _only_captured(profile, cluster, request)
    if reason is not None:
        return replace(of(compiled=False), way_reason=reason)
    found: dict[bool, Exploration] = {}
    refused: dict[bool, BaPipeError] = {}
    for compiled in (False, True):
        try:
            found[compiled] = of(compiled=compiled)
        except BaPipeError as error:
            refused[compiled] = error
    if not found:
        raise refused[False]
    if refused:
        ((compiled, refusal),) = refused.items()
        why = "no plan fits" if isinstance(refusal, InfeasibleError) else str(refusal)
        return replace(found[not compiled], way_reason=f"{way_words(compiled=compiled)}, {why}")
    return _faster(found[False], found[True])


def _asked(request: Request, profile: Profile) -> Request:
    """The request of one way: torch's engines run no compiled layers, so nobody gets them unasked there."""
    compiled = profile.compiled if request.compiled == "auto" else request.compiled
    return replace(request, engines=False) if compiled else request


def _only_captured(profile: Profile, cluster: Cluster, request: Request) -> str | None:
    """Why stages cannot run compiled; None: they can."""
    if request.strategy in ENGINES:
        return f"{request.strategy} runs layers as they are"
    known = profile.compiled_accelerators or {}
    lacking = [item.type for item in cluster.accelerators if item.type not in known]
    return f"layers were not measured compiled on {lacking[0]}" if lacking else None


def _faster(captured: Exploration, compiled: Exploration) -> Exploration:
    """The one whose best plan has the higher throughput; as captured, where both are as fast: it starts sooner."""
    gain = compiled.best.throughput / captured.best.throughput - 1
    best, other = (compiled, captured) if gain > captured.tuning.as_fast else (captured, compiled)
    return replace(best, other_way=other)


def other_way_of(found: Exploration) -> Exploration | None:
    """The other way's search, as what was chosen, with this one as its other; None where there is none."""
    return None if found.other_way is None else replace(found.other_way, other_way=replace(found, other_way=None))


def other_may_be_faster(found: Exploration) -> bool:
    """Whether the other way's best plan is within the error of the best one: as fast in 5 % of the scenarios.

    The two were measured apart, so every scenario of one is held against every one of the other. Where no error is
    known, nobody can say.
    """
    if found.other_way is None:
        return False
    if found.outlook is None and found.other_way.outlook is None:
        return True
    return bool(np.mean(_seconds(found.other_way)[:, None] <= _seconds(found)[None, :]) >= _LEVEL)


def _seconds(found: Exploration) -> Floats:
    """Of the best plan, per sample, in every scenario; alone where no error is known."""
    best, outlook = found.best, found.outlook
    times = np.array([best.time]) if outlook is None else outlook.times[0] + best.overhead
    return np.asarray(times / best.samples, dtype=np.float64)


def way_note(found: Exploration) -> str | None:
    """Which way the stages run and why, in a line; None where the profile has one way, or one was asked for."""
    runs = f"stages run {way_words(compiled=found.compiled)}"
    if found.way_reason is not None:
        return f"{runs}: {found.way_reason}"
    other = found.other_way
    if other is None:
        return None
    longer, words = found.best.throughput / other.best.throughput - 1, way_words(compiled=other.compiled)
    pace = "as long" if abs(longer) < found.tuning.as_fast else f"{abs(longer):.1%} {_than(longer)}"
    once = "" if not found.compiled else "; every run compiles once, before its first step"
    return (
        f"{runs}: {words}, the best plan is {other.best.candidate.label}, micro-batch "
        f"{other.best.candidate.chain.microbatch}, and takes {format_seconds(other.best.time)}, {pace}{once}"
    )


def _than(longer: float) -> str:
    return "longer" if longer > 0 else "less"

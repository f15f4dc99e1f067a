"""Why a plan leaves accelerators idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import rank
from bapipe.planner.request import Request
from bapipe.units import format_bytes, format_seconds, format_slower

__all__ = ["idle_note"]


def idle_note(
    best: Evaluation, considered: Sequence[Evaluation], hardware: Hardware, request: Request
) -> str | None:
    """How many accelerators the plan has no work for, and why; None where all have some."""
    total = len(hardware.cluster)
    idle = total - _used(best.candidate)
    if not idle:
        return None
    return f"{idle} of {total} accelerators are idle: {_why(best, considered, hardware, request)}"


def _used(candidate: Candidate) -> int:
    return len({index for stage in candidate.stages for index in stage.accelerators})


def _left_over(candidate: Candidate, cluster: Cluster) -> str:
    """Where replicas of the pipeline are of different types, how many accelerators of each type none takes."""
    kinds = [{cluster.accelerators[index].type for index in stage.accelerators} for stage in candidate.stages]
    if min(map(len, kinds)) < 2:
        return ""
    used = {index for stage in candidate.stages for index in stage.accelerators}
    left = Counter(item.type for index, item in enumerate(cluster.accelerators) if index not in used)
    return " and ".join(f"{count} {name}" for name, count in left.items())


def _why(best: Evaluation, considered: Sequence[Evaluation], hardware: Hardware, request: Request) -> str:
    candidate, total = best.candidate, len(hardware.cluster)
    if request.stages is not None:
        return f"--stages {request.stages} asks for a pipeline of as many accelerators"
    everywhere = [own for own in considered if _used(own.candidate) == total]
    fitting = [own for own in everywhere if own.short is None]
    if fitting:
        fastest = max(fitting, key=lambda own: own.throughput)
        slower = best.throughput / fastest.throughput - 1
        return f"the fastest plan on all of them is {fastest.candidate.label}, {format_slower(slower)}"
    left_over = _left_over(candidate, hardware.cluster)
    if left_over:
        return (
            f"each replica takes {len(candidate.stages)} accelerators of one type, and {left_over} are left over"
        )
    if candidate.copies > 1:
        each = _used(candidate) // candidate.copies
        return (
            f"each of {candidate.copies} replicas takes {each}, and replicas divide the global batch of "
            f"{best.samples} evenly; a global batch that is a multiple of {total} allows other divisions"
        )
    closest = min(everywhere, key=rank, default=None)
    if closest is not None and closest.short is not None:
        lacking = format_bytes(closest.short[1])
        return f"no plan on all of them fits; the closest ({closest.candidate.label}) is {lacking} short"
    layers = len(candidate.chain)
    if layers < total:
        return f"a pipeline has at most one stage per layer here, {layers}, and no plan with replicas is as fast"
    return f"no pipeline on all of them was found that is faster than {format_seconds(best.time)}"

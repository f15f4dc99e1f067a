"""Pass: stop with one line that says what would help where no candidate fits."""

from __future__ import annotations

from bapipe.costs.held_weights import stage_gradients
from bapipe.costs.stage_memory import UnitBytes
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.state import SearchState
from bapipe.schedule.v_shape import V_SHAPED
from bapipe.units import format_bytes

__all__ = ["require_plan"]


def require_plan(state: SearchState) -> None:
    """Add nothing; raise BaPipeError where the request leaves no candidate, InfeasibleError where none fits."""
    if not state.incumbents.by_family:
        raise _nothing_to_try(state)
    if state.incumbents.best is None:
        raise _nothing_fits(state)


def _nothing_to_try(state: SearchState) -> BaPipeError:
    """What of the request leaves no candidate."""
    request, count, global_batch, sizes = state.request, len(state.cluster), state.global_batch, state.sizes
    if request.schedule == "data-parallel" or request.strategy == "dp":
        each = count * min(sizes)
        fewer = global_batch // each * each
        others = f"{fewer} or {fewer + each}" if fewer else f"{each}"
        return BaPipeError(
            f"data parallelism deals whole micro-batches evenly to {count} accelerators, and {global_batch} "
            f"samples are not a multiple of {count} x {min(sizes)}; make --global-batch {others}, "
            "or change --micro-batch"
        )
    several = request.schedule if request.schedule in ("interleaved", *V_SHAPED) else None
    if several is not None and count < 2:
        return BaPipeError(f"{several} needs at least 2 accelerators, the cluster has 1; leave --schedule out")
    if several is not None and request.stages == 1:
        return BaPipeError(f"{several} needs at least 2 stages, each in parts; leave --stages out")
    if request.schedule in V_SHAPED and len(state.profile.layers) < 4:
        layers = len(state.profile.layers)
        return BaPipeError(
            f"{several} needs at least 4 layers, two on each of 2 accelerators, {state.profile.model.name} has "
            f"{layers}; leave --schedule out"
        )
    asked = request.schedule or request.strategy
    return BaPipeError(f"nothing can be tried with {asked} and {global_batch} samples; leave --schedule out")


def _nothing_fits(state: SearchState) -> InfeasibleError:
    """Which stage of the closest candidate lacks how much, and what would help."""
    hardware, closest = state.hardware, state.incumbents.ranked()[0]
    assert closest.short is not None
    stage, short = closest.short
    choice, chain = closest.candidate.stages[stage], closest.candidate.chain
    together = [item for item in closest.candidate.stages if item.accelerators == choice.accelerators]
    names = chain.profile.layers
    first, last = chain.units[choice.first].layer, chain.units[choice.last].layer
    each = state.static_bytes(chain) + UnitBytes.of(chain).saved_activations * closest.inflight[stage]
    heaviest = chain.units[choice.first + int(each[choice.first : choice.last + 1].argmax())].layer
    need = closest.memory[stage]
    more = f", with {len(together) - 1} more on its accelerator" if len(together) > 1 else ""
    helps = [f"accelerators of {format_bytes(need)}"]
    if chain.microbatch > 1:
        helps.append("a smaller --micro-batch (profile smaller sizes if they are missing)")
    if hardware.optimizer.memory.state > 0:
        held = sum(stage_gradients(chain, item.first, item.last) for item in together)
        saved = held * (hardware.static_copies() - 2)
        helps.append(f"--optimizer sgd (saves {format_bytes(saved)} there)")
    if len(closest.candidate.stages) < len(chain) and choice.first < choice.last:
        helps.append("more accelerators")
    return InfeasibleError(
        f"nothing fits: the closest, {closest.candidate.label} at micro-batch {chain.microbatch}, is "
        f"{format_bytes(short)} short on stage {stage} (layers '{names[first].name[:60]}' to "
        f"'{names[last].name[:60]}', the heaviest '{names[heaviest].name[:60]}'{more}), which needs "
        f"{format_bytes(need)} of {format_bytes(closest.capacity[stage])}; any of these would help: "
        + "; ".join(helps)
    )

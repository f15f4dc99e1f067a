"""Pass: plans whose replicas share optimizer states (ZeRO-1), and those that torch's DDP and FSDP2 run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bapipe.costs.optimizers import is_elementwise
from bapipe.errors import BaPipeError
from bapipe.planner.candidate import Candidate, unreplicated
from bapipe.planner.data_parallel import at_global_batch, dealt_data_parallel
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.hybrids import balanced_hybrids
from bapipe.planner.incumbents import Incumbents, rank
from bapipe.planner.pipelines import FAMILIES, build
from bapipe.planner.request import ENGINES
from bapipe.planner.state import SearchState

__all__ = ["share_states", "try_engines"]

_HYBRIDS = ("1f1b", "1f1b-sno", "1f1b-so")
"""schedules under which hybrids are tried that would not fit otherwise"""


def share_states(state: SearchState) -> None:
    """Add the same plans with optimizer states shared by the replicas of a stage, and some that only fit so.

    Without replicas there is nothing to share, and SGD has no state. Where it is asked for, only these stay; else
    they are among the plans where nothing else fits or where they save enough, and are listed otherwise.
    """
    request, forced = state.request, state.request.zero_stage == "1"
    if request.zero_stage == "0" or state.paper or request.strategy in ENGINES:
        return
    known, memory = is_elementwise(state.hardware.optimizer.name), state.hardware.optimizer.memory
    if known is False and forced:
        raise BaPipeError(
            f"{state.hardware.optimizer.name[:60]} looks at more than one element of a weight at a time, so that "
            "its state cannot be sharded (ZeRO-1); give --zero-stage 0"
        )
    found = Incumbents(state.tuning)
    if forced or (known and memory.state > 0):
        for candidate in list(_candidates(state)):
            sharded = replace(candidate, zero=True, label=f"{candidate.label}, ZeRO-1")
            if found.is_new(sharded):
                found.add(f"{candidate.schedule.name}, ZeRO-1", evaluate(sharded, state.hardware))
    state.incumbents.count += found.count
    held, best = state.incumbents.best, found.best
    worth = best is not None and (held is None or best.time < (1 - state.tuning.engine_worth) * held.time)
    if forced or held is None or worth:
        state.incumbents.by_family |= found.by_family
    else:
        state.engines.extend(found.by_family.values())
    if forced:
        own = {name: item for name, item in state.incumbents.by_family.items() if item.candidate.zero}
        if not own:
            raise BaPipeError("no plan has replicas that could share optimizer states; drop --zero-stage 1")
        state.incumbents.by_family = own


def _candidates(state: SearchState) -> Iterator[Candidate]:
    """Plans with replicas: those found so far, data parallelism, and where memory was short balanced hybrids."""
    found = list(state.incumbents.by_family.values())
    flushing = [own for own in found if own.candidate.schedule.flushes]
    yield from (own.candidate for own in flushing if not unreplicated(own.candidate.stages))
    request = state.request
    if request.stages not in (None, 1) or request.strategy not in ("exact", "dp"):
        return
    if request.schedule in (None, "data-parallel"):
        for size in state.tried_sizes:
            chain = state.chain(size)
            whole = at_global_batch(chain, state.hardware, state.global_batch)
            dealt = None
            if request.dealing == "speed" and request.strategy == "exact":
                dealt = dealt_data_parallel(chain, state.hardware, state.global_batch)
            yield from (own for own in (whole, dealt) if own is not None)
    short = state.incumbents.best is None or any(own.short is not None for own in found)
    if short and request.strategy == "exact" and request.schedule in (None, *_HYBRIDS) and request.cap is None:
        for size in state.tried_sizes:
            chain, count = state.chain(size), state.global_batch // size
            for _, stages in balanced_hybrids(chain, state.hardware, count, state.tuning):
                for name in _HYBRIDS if request.schedule is None else (request.schedule,):
                    yield build(chain, stages, FAMILIES[name], count, state.hardware, state.tuning)


def try_engines(state: SearchState) -> None:
    """Add data parallelism as torch's DDP and FSDP2 run it, where it is asked for, is the only one that fits, or
    saves enough; else it is listed among the alternatives."""
    request = state.request
    forced = request.strategy if request.strategy in ENGINES else None
    free = request.strategy == "exact" and request.schedule in (None, "data-parallel")
    free = free and request.engines and request.zero_stage != "1" and request.stages in (None, 1)
    if state.paper or not (forced or free) or len(state.cluster) < 2:
        return
    if request.recompute not in ("auto", "never", "stages", "layers"):
        return  # torch's engines run layers as they are
    if any(state.cluster.type_of(index).execution != "synchronous" for index in range(len(state.cluster))):
        return
    for engine in ENGINES if forced is None else (forced,):
        best = _best(state, engine)
        if best is None:
            continue
        held = state.incumbents.best
        if forced or held is None or best.time < (1 - state.tuning.engine_worth) * held.time:
            state.incumbents.add(engine, best)
        else:
            state.engines.append(best)


def _best(state: SearchState, engine: str) -> Evaluation | None:
    """The fastest micro-batch size that fits, or the one that lacks least."""
    found = []
    for size in state.tried_sizes:
        candidate = at_global_batch(state.chain(size), state.hardware, state.global_batch)
        if candidate is not None:
            words = {"ddp": "DDP of torch", "fsdp": "FSDP2 of torch"}[engine]
            label = candidate.label.replace("data parallelism", words)
            made = replace(candidate, engine="ddp" if engine == "ddp" else "fsdp", label=label)
            found.append(evaluate(made, state.hardware))
    return min(found, key=rank, default=None)

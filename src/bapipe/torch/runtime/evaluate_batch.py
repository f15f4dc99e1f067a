"""One global batch through the stages in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch

from bapipe.torch.comm import guarded
from bapipe.torch.runtime.evaluation_outputs import (
    Evaluated,
    OnOutput,
    OutputsOn,
    gather_outputs,
    joined_outputs,
    wanted_ranks,
)
from bapipe.torch.runtime.rank_engine import Engine

__all__ = ["evaluate_batch"]


def evaluate_batch(
    engine: Engine,
    inputs: Any,
    targets: Any,
    *,
    outputs: OutputsOn | None = None,
    on_output: OnOutput | None = None,
) -> Evaluated:
    """The loss of one global batch, and what the model returns for it; nothing changes. Collective.

    Where outputs are wanted and there are no targets for the loss, there is no loss.
    """
    wanted = () if outputs is None else wanted_ranks(outputs, len(engine.plan.ranks))
    takes_outputs = outputs is not None or on_output is not None
    made: dict[int, Any] = {}

    def take(microbatch: int, output: Any) -> None:
        if wanted:
            made[microbatch] = output
        if on_output is not None:
            on_output(microbatch, output)

    with engine.watch.guard():
        engine.watch.progress.note(f"evaluating after {engine.steps} steps")
        batch = engine.cut(inputs, targets)
        engine.agree(batch, "evaluates" if outputs is None else "evaluates for outputs")
        written = [(buffer, buffer.clone()) for _, buffer in engine.state.named_buffers()]
        engine.loss.scale = None
        last = engine.runners.get(engine.schedule.num_stages - 1)
        if last is not None and takes_outputs:
            last.on_output = take
            last.skips_loss = engine.needs.targets is not None and not len(batch.targets)
        try:
            engine.run(batch, training=False)
            loss = engine.summed_loss(divide=False)
        finally:
            if last is not None:
                last.on_output, last.skips_loss = None, False
        with torch.no_grad():
            for buffer, value in written:
                buffer.copy_(value)
        found = loss if engine.has_loss else None
        return Evaluated(loss=found, outputs=_gathered(engine, made, wanted, loss) if wanted else None)


def _gathered(engine: Engine, made: dict[int, Any], wanted: tuple[int, ...], loss: float) -> Any:
    last = engine.schedule.num_stages - 1
    makers = [engine.schedule.rank_of(last, number) for number in range(len(engine.layout.sizes))]
    with engine.watch.meeting("gathering outputs"), guarded(None):
        parts = gather_outputs(made, makers, wanted)
    if parts is None:
        return None
    own = engine.own.loss
    known = None if own is None or engine.takes_targets else (own.leaf, loss)
    return engine.own.output(joined_outputs(parts, engine.own.sample_dims, known))

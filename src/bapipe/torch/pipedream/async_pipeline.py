"""`PipeDream`: asynchronous 1F1B with weight versions (SOSP 2019), to compare synchronous schedules with.

Every micro-batch of the plan is a global batch of PipeDream's, with an optimizer step of its own; the pipeline
drains only at the end. Stage i (from 0) of N holds N − i micro-batches and as many versions of its weights: a
backward uses those that its forward used, and its optimizer step (U) goes into the newest.

    rank 0   F0 F1 F2 B0U F3 B1U F4 B2U …     N = 3; rank 0 starts on micro-batch 3 after one optimizer step,
    rank 1      F0 F1 B0U F2 B1U F3 B2U …     rank 1 after two, rank 2 after three
    rank 2         F0 B0U F1 B1U F2 B2U …

With vertical sync a micro-batch has the same version at all stages, stage 0's, and every stage holds N versions.

pipe = PipeDream(build_model, plan="plan.json", loss_fn=loss_fn)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
trace = pipe.train(batches, optimizer, steps=100)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.capturing import Captured
from bapipe.torch.comm import guarded
from bapipe.torch.pipedream.async_run import AsyncHooks, AsyncRun, AsyncStage, EndlessTrace
from bapipe.torch.pipedream.stage_channels import StageChannels
from bapipe.torch.pipedream.weight_versions import WeightVersions
from bapipe.torch.runtime.build_stages import Build
from bapipe.torch.runtime.gradient_sync import Reducer, TiedWeights
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan, as_runnable
from bapipe.torch.runtime.rank_engine import Engine
from bapipe.torch.runtime.rank_model import RankModel
from bapipe.torch.stage.loss import LossFunction, LossOfEach

__all__ = ["PipeDream"]


class PipeDream(RankModel):
    """This rank's stage of a model that PipeDream trains; made on every rank at once, as a `Pipeline` is.

    The plan's schedule is `pipedream`. A weight that several stages hold is refused: each takes optimizer steps by
    itself, so they would drift apart. Running statistics have one version. `evaluate` and the state are those of
    the newest weights. There is no `step`: no global batch is waited for.
    """

    def __init__(
        self,
        build_model: Build | Captured,
        plan: Plan | RunnablePlan | str | Path,
        loss_fn: LossFunction | None = None,
        *,
        vertical_sync: bool = False,
        checkpoint: str | Path | Mapping[str, Tensor] | None = None,
        options: PipelineOptions | None = None,
        **changes: Any,
    ) -> None:
        """`loss_fn(output, target)` is a mean, a sum, or (sum, count), of each micro-batch by itself.

        `vertical_sync` costs N versions of the weights at every stage, which a plan does not count. The rest is as
        in `Pipeline`.
        """
        engine = Engine(
            build_model,
            as_runnable(plan, flushes=False),
            loss_fn,
            checkpoint=checkpoint,
            options=replace(options or PipelineOptions(), **changes),
            make_sums=_no_sums,
        )
        super().__init__(engine)
        caps = engine.schedule.caps
        assert caps is not None, "check_plan has seen to it"
        self._caps = caps
        self.stage = engine.stages[0]
        """this rank's only stage"""
        self.vertical_sync = vertical_sync
        self._stage = AsyncStage(
            number=self.stage,
            in_flight=caps[self.stage],
            versions=WeightVersions(engine.state.parameters, self.lag_of(self.stage)),
            losses=LossOfEach(engine.weighing),
            channels=StageChannels(self.stage, engine.schedule, engine.own, engine.sizes, engine.transport),
        )

    def lag_of(self, stage: int) -> int:
        """How many optimizer steps behind the newest at most the weights are that a stage's micro-batches see."""
        return self._caps[0 if self.vertical_sync else stage] - 1

    def train(
        self,
        batches: Iterable[tuple[Any, Any]],
        optimizer: torch.optim.Optimizer | None,
        *,
        steps: int,
        on_update: Callable[[int], None] | None = None,
        on_step: Callable[[int, float, float, float | None], None] | None = None,
    ) -> EndlessTrace:
        """Train on so many of the plan's global batches, with an optimizer step after each of their micro-batches.

        Collective: every rank may give the batches as they are, or None in place of what it does not need.
        `optimizer` steps this rank's parameters; None where there are none to train. `on_update(number)` is called
        after each optimizer step, with its gradients still in place: there a learning rate may change.
        `on_step(step, loss, seconds, bubble)` is called on rank 0 when a global batch has had all its optimizer
        steps; its bubble is the share of all ranks' time without compute, None where nothing is traced. Raises
        RunError where this rank or another fails.
        """
        if steps < 1:
            raise BaPipeError(f"a run needs at least 1 step, got {steps}; raise steps")
        total = steps * len(self.engine.sizes)
        run = AsyncRun(
            self.engine, self._stage, optimizer, total, AsyncHooks(on_update=on_update, on_step=on_step)
        )
        with self.watch.guard():
            self._stage.versions.begin(total)
            self._stage.channels.begin(total)
            with self.watch.meeting("ready"), guarded(None):
                dist.barrier()
            trace = run.to_the_end(iter(batches))
        self.steps += steps
        return trace


def _no_sums(
    _placement: Sequence[Sequence[int]],
    users: Mapping[str, tuple[int, ...]],
    _own: Mapping[int, Mapping[str, nn.Parameter]],
    _new_group: Callable[[Sequence[int]], dist.ProcessGroup],
) -> tuple[dict[int, Reducer], TiedWeights]:
    """No rank sums anything with another."""
    tied = next(((name, stages) for name, stages in users.items() if len(stages) > 1), None)
    if tied is not None:
        raise BaPipeError(
            f"'{tied[0]}' is on stages {', '.join(map(str, tied[1]))}, and PipeDream updates every stage by "
            "itself, so they would drift apart; untie it, or plan with 1f1b-so"
        )
    return {}, TiedWeights({}, {})

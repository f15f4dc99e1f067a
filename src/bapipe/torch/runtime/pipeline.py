"""`Pipeline`: a plan, trained step by step from the user's own loop; every rank makes one.

pipe = Pipeline(build_model, plan="plan.json", loss_fn=loss_fn)
optimizer = torch.optim.AdamW(pipe.parameters())
for inputs, targets in loader:
    loss = pipe.step(inputs, targets)
    pipe.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from bapipe.torch.comm.rank_agreement import max_over_ranks
from bapipe.torch.health.divergence import DivergenceMonitor, Diverging
from bapipe.torch.health.stragglers import Straggler, StragglerMonitor, planned_seconds
from bapipe.torch.inputs.elementwise_steps import require_elementwise
from bapipe.torch.runtime.build_stages import Build
from bapipe.torch.runtime.executor import RankTrace
from bapipe.torch.runtime.gradient_sync import Reducer, make_sums
from bapipe.torch.runtime.loss_scaler import LossScaler
from bapipe.torch.runtime.nonfinite import NonFinite
from bapipe.torch.runtime.optimizer_shards import ShardedReducer
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan, as_runnable
from bapipe.torch.runtime.rank_batches import MicroBatches
from bapipe.torch.runtime.rank_engine import Engine
from bapipe.torch.runtime.rank_model import RankModel
from bapipe.torch.stage.loss import LossFunction

__all__ = ["Build", "Pipeline"]

_logger = logging.getLogger(__name__)
_SKIPPED = 3
"""steps in a row with a loss that is not finite from which on lowering a scale does not help"""


class Pipeline(RankModel):
    """This rank's part of a model that is trained by a plan.

    Made on every rank of a `torchrun` at once. The model is built by `build_model()`, which returns (module, args,
    kwargs) with an example of its inputs, and cut where the plan cuts it; only this rank's stages are kept. Names
    of parameters and buffers are the model's own. `with Pipeline(…) as pipe:` closes it.
    """

    def __init__(
        self,
        build_model: Build | Captured,
        plan: Plan | RunnablePlan | str | Path,
        loss_fn: LossFunction | None = None,
        *,
        checkpoint: str | Path | Mapping[str, Tensor] | None = None,
        options: PipelineOptions | None = None,
        **changes: Any,
    ) -> None:
        """`loss_fn(output, target)` is a mean, a sum, or (sum, count); without it the model returns its loss.

        Over what a mean is taken is recognised, such as labels that are not ignored; where it cannot be, one rank
        warns and micro-batches weigh by their samples. `token_mean` says it. The gradients are those of one loss
        of the whole global batch.

        A model that was captured already may stand in place of `build_model`; it is trained itself, not a copy.
        `checkpoint` is the state of the whole model: a mapping, a safetensors file or folder, or a .pt file; each
        rank reads its own part. A model that is built on the meta device takes memory for this rank's stages only,
        filled from the checkpoint or by its modules' `reset_parameters`.

        The rest is in `options`, whose fields may also be given here by name: `Pipeline(…, device="cuda:1")`. What
        takes long is logged at INFO.
        """
        chosen = replace(options or PipelineOptions(), **changes)
        runnable = as_runnable(plan, flushes=True)
        if runnable.plan.engine != "bapipe":
            raise BaPipeError(
                f"the plan is for torch's {runnable.plan.engine}, which bapipe run trains; plan with --strategy dp"
            )
        engine = Engine(
            build_model,
            runnable,
            loss_fn,
            checkpoint=checkpoint,
            options=chosen,
            make_sums=functools.partial(make_sums, kind=ShardedReducer) if runnable.plan.zero_stage else make_sums,
        )
        super().__init__(engine)
        self._steps_shards = not engine.shards.any
        """whether the optimizer steps what this rank is to step"""
        self._last: float | None = None
        """when the last step had run its actions"""
        self._on_straggler = chosen.on_straggler or self._log_straggler
        self._stragglers = StragglerMonitor(planned_seconds(engine.plan), global_batch=engine.plan.global_batch)
        self._divergence, self._on_divergence = DivergenceMonitor(), chosen.on_divergence or self._log_divergence
        self._scaler: LossScaler | None = None
        """of the last step"""
        self._scaled = False
        """whether the last step had a scaler, of whatever kind"""
        self._nonfinite_losses = 0
        """steps in a row whose loss was not finite"""
        self._reported = False
        """whether what is not finite was reported"""
        self.trace: RankTrace | None = None
        """what this rank did in the last global batch; None before the first, and where nothing is traced"""

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        scaler: LossScaler | torch.amp.GradScaler | None = None,
        weight: float = 1.0,
    ) -> float:
        """Train on one global batch: gradients are added to `.grad`; the loss is returned on every rank.

        Every rank may give the whole batch; stages that take no input may give None. A batch of `data_loader`
        stands for both arguments. A batch of fewer samples than planned runs in fewer micro-batches, the last of
        which may be smaller; gradients are those of the mean over what is there.

        `weight` multiplies the gradients, and not the loss that is returned: 1/k where k steps accumulate to a
        mean. A `scaler` (see `grad_scaler`) multiplies the loss, and so the gradients, with its scale; fp16-mixed
        needs one. Raises RunError where this rank or another one fails, and BaPipeError, before anything runs,
        where the batch cannot be run.
        """
        if scaler is None and self.engine.precision.scaled:
            raise BaPipeError(
                f"{self.engine.precision.word} scales the loss; make scaler = pipe.grad_scaler(), give it to step"
            )
        if not self._steps_shards:
            raise BaPipeError(
                "the plan shards the optimizer state over replicas (ZeRO-1); make the optimizer with "
                "pipe.make_optimizer(torch.optim.AdamW), or plan with --zero-stage 0"
            )
        with self.watch.guard():
            self.watch.progress.begin(self.steps)
            loss = self._step(inputs, targets, scaler, weight)
            diverging = self._look_at_gradients(scaler)
            self.watch.progress.note(f"after step {self.steps - 1}")
        if diverging is not None:
            self._on_divergence(diverging)
        is_whole = self.engine.layout.sizes == self.engine.sizes
        slow = self._stragglers.observe(self.steps - 1, *self.engine.step_times) if is_whole else None
        if slow is not None:
            self._on_straggler(slow)
        return loss

    def _log_straggler(self, found: Straggler) -> None:
        if self.rank == 0:
            _logger.warning("%s", found.line)

    def _log_divergence(self, found: Diverging) -> None:
        if self.rank == 0:
            _logger.warning("%s", found.line)

    def _look_at_gradients(self, scaler: LossScaler | torch.amp.GradScaler | None) -> Diverging | None:
        """Whether they have become much larger than they were; now and then, on all ranks alike."""
        step = self.steps - 1
        if not self._divergence.is_due(step):
            return None
        norms, scale = self.engine.gradient_norms, 1.0 if scaler is None else scaler.get_scale()
        norm = norms.joint() / scale
        usual = self._divergence.observe(norm)
        return None if usual is None else norms.diverging(step, norm=norm, usual=usual, scale=scale)

    def _step(
        self, inputs: Any, targets: Any, scaler: LossScaler | torch.amp.GradScaler | None, weight: float
    ) -> float:
        engine = self.engine
        batch = engine.cut(inputs, targets)
        engine.agree(batch, "trains")
        before = self._set_gradients_aside()
        self._scaler = scaler if isinstance(scaler, LossScaler) else None
        scale = None if scaler is None else scaler.scale(torch.ones((), device=self.device))
        if weight != 1.0:
            one = torch.ones((), dtype=torch.float64, device=self.device) if scale is None else scale
            scale = one * weight
        engine.loss.scale = scale
        trace = engine.run(batch, training=True)
        reduced = [self._reduced(stage, reducer) for stage, reducer in engine.reducers.items()]
        events = tuple(event for event in reduced if event is not None)
        self.trace = None if trace is None else replace(trace, events=(*trace.events, *events))
        with self.watch.meeting("summing tied gradients"):
            engine.tied.finish()
        now = time.perf_counter()
        since = now - self._last if self._last is not None else 0.0
        computed = 0.0 if trace is None else trace.computed
        loss = engine.summed_loss(divide=True, times=(computed, since))
        self._last = now
        self._look_at_loss(loss, batch, scaled=scaler is not None)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.steps += 1
        return loss

    def _look_at_loss(self, loss: float, batch: MicroBatches, *, scaled: bool) -> None:
        """Report a loss that is not finite, once. All ranks have the same loss, so all look or none does.

        A scaler skips steps that overflow; with one, only a loss that stays so is reported.
        """
        self._scaled = scaled
        self._nonfinite_losses = 0 if math.isfinite(loss) else self._nonfinite_losses + 1
        if self._reported or self._nonfinite_losses < (_SKIPPED if scaled else 1):
            return
        step = self.steps
        self._report(self.engine.search.look(step, loss, lambda: self.engine.replay(batch, step)))

    def _report(self, found: NonFinite) -> None:
        self._reported = True
        if self.engine.on_nonfinite is not None:
            self.engine.on_nonfinite(found)
        elif self.rank == 0:
            _logger.warning("%s", found.line)

    def _reduced(self, stage: int, reducer: Reducer) -> tuple[str, float, float] | None:
        """Finish a stage's all-reduce and say how long that took, where it is traced."""
        clock = self.clock
        start = clock.mark() if clock.traces else None
        with self.watch.meeting(f"all-reduce {stage}A"):
            reducer.finish()
            if not clock.traces:
                return None
            begun, ended = clock.times([start, clock.mark()])
        return f"{stage}A", begun, ended

    def _set_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Gradients of earlier batches were summed and divided already: this one's join them at the end."""
        kept = [(item, item.grad) for item in self.engine.shards.stepped() if item.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def make_optimizer(
        self, make: Callable[[list[Any]], torch.optim.Optimizer], parameters: Sequence[Any] | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer that `make` makes of this rank's parameters, or of those given, or of groups of them.

        Where the plan shards optimizer states (ZeRO-1) it is made of this rank's parts of them instead: a step of
        it then brings every replica the whole weights, so that all ranks take it. `make` must make one that
        changes each element of a weight by that element's gradient and state alone, as Adam and SGD do.
        Parameters that are not trained are left out.
        """
        given = list(self.parameters() if parameters is None else parameters)
        if not self.engine.shards.any:
            return make(given)
        optimizer = make(self.engine.shards.translated(given))
        require_elementwise(optimizer)
        optimizer.register_step_post_hook(lambda *_: self._share_weights())
        self._steps_shards = True
        return optimizer

    def _share_weights(self) -> None:
        with self.watch.guard(), self.watch.meeting("gathering weights"):
            self.engine.shards.share_weights()

    def drop_gradients(self) -> None:
        """Forget all gradients, as an optimizer's `zero_grad` does."""
        for parameter in (*self.parameters(), *self.engine.shards.stepped()):
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor | None]:
        """Every parameter's gradient by name, whole also where replicas share it (ZeRO-1); all ranks call it."""
        with self.watch.guard(), self.watch.meeting("gathering gradients"):
            return self.engine.shards.whole_gradients()

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Stage of this rank -> most micro-batches in flight at once in the last global batch."""
        return {stage: runner.peak_in_flight for stage, runner in self.engine.runners.items()}

    def grad_scaler(self, **options: Any) -> LossScaler:
        """A scaler for fp16 with one scale for all ranks: an infinite gradient on one skips all optimizer steps.

        `options` are those of `torch.amp.GradScaler`: init_scale, growth_factor, backoff_factor, growth_interval.
        """
        return LossScaler(self.engine.shards.stepped, self.device, self._most, **options)

    def _most(self, value: float) -> float:
        with self.watch.guard(), self.watch.meeting("looking for overflow"):
            return max_over_ranks(value)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

        A weight on several ranks counts once. Gradients that a scaler of `grad_scaler` has not unscaled yet count
        as unscaled ones.
        """
        own = self.engine.counted_gradients()
        norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) for gradient in own]
        infinite = norm_type == float("inf")
        part = torch.zeros((), dtype=torch.float64)
        with self.watch.guard(), self.watch.meeting("clipping gradients"), guarded(None):
            if norms:
                stacked = torch.stack(norms).cpu()  # the host waits for the device once
                part = stacked.max() if infinite else (stacked**norm_type).sum()
            dist.all_reduce(part, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
        total = float(part) if infinite else float(part) ** (1 / norm_type)
        if not math.isfinite(total) and not self._scaled and not self._reported:
            with self.watch.guard():
                self._report(self.engine.search.look(self.steps - 1, None, None))
        total /= 1.0 if self._scaler is None else self._scaler.divisor
        factor = max_norm / (total + 1e-6)
        if factor < 1:
            for parameter in self.engine.shards.stepped():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return total

"""One (virtual) stage on one rank: its forward and backward of one micro-batch, and what is kept between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bapipe.torch.capturing import Stage
from bapipe.torch.compiling.compiled_layers import CompiledLayers
from bapipe.torch.device.h2d_copy import Upload
from bapipe.torch.device.precision_modes import MixedForward
from bapipe.torch.stage.activation_checkpoints import CheckpointedLayers, Deferred
from bapipe.torch.stage.forward_watch import ForwardWatch
from bapipe.torch.stage.input_boundary import Entrance
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.saved_tensors import SavedValues
from bapipe.torch.stage.split_backward import DelayedWeights, SplitBackward

__all__ = ["StageRunner"]

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class StageRunner:
    """Runs micro-batches of a stage. A micro-batch is in flight from its forward to the end of its backward."""

    def __init__(
        self,
        stage: int,
        modules: Mapping[int, Stage],
        *,
        sizes: Sequence[int],
        evaluation: Mapping[int, Stage] | None = None,
        device: torch.device | None = None,
        recompute: bool = False,
        split: bool = False,
        loss: LossSum | None = None,
        output: Callable[[Sequence[Any]], Any] | None = None,
        mixed: MixedForward | None = None,
    ) -> None:
        """`modules` by micro-batch size, `evaluation` the same in evaluation mode; `sizes` are the micro-batches'.

        `split`: its backwards are done in two actions, `input_gradient` and `weight_gradient`. The last stage
        has a `loss`, and puts together what the model returns with `output`. Forwards run under autocast where
        they are `mixed`, in its region of a global batch.
        """
        self.stage = stage
        self.recompute = recompute
        self.peak_in_flight = 0
        self.sent_dtypes: tuple[torch.dtype, ...] | None = None
        """what is sent is converted to; None: it has the captured dtypes, as always without autocast"""
        self.made_dtypes: tuple[torch.dtype, ...] = ()
        """of what the last forward made, before it was converted"""
        self.forward_watch: ForwardWatch | None = None
        """while it is set, `evaluate` runs the stage as in training, and every value is looked at"""
        self._mixed = _NOTHING if mixed is None else mixed.forward()
        self._casts = mixed is not None
        """whether weights are cast"""
        self._cast = False
        """whether they have been, in this global batch"""
        self._upload = None if device is None else Upload(device)
        self._modules = modules
        self._evaluation = evaluation or {}
        self._planned = self._sizes = tuple(sizes)
        self.on_output: Callable[[int, Any], None] | None = None
        """while it is set, `evaluate` of the last stage calls it with a micro-batch and what the model returns"""
        self.skips_loss = False
        """while it is set, there is nothing to compute a loss of"""
        self._loss = loss
        self._output = output
        self._step = 0
        self._inputs: Sequence[Sequence[Any]] = ()
        self._targets: Sequence[Any] = ()
        self._weights: Mapping[str, Tensor] = {}
        self._in_flight: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        """micro-batch -> what the stage received, if needed again, and what it made (the last stage: a loss)"""
        self._entrances: dict[int, Entrance] = {}
        """micro-batch -> where its gradients come out; not of a stage whose backwards are done in two parts"""
        spec = self.spec
        self._delayed: dict[int, DelayedWeights | None] = {}
        """micro-batch -> weight gradients that wait for their turn"""
        self._saved: dict[int, SavedValues] = {}
        """micro-batch -> what its forward saved, until it is known what of it the weight gradients need"""
        self._deferred: dict[int, list[Deferred]] = {}
        """micro-batch -> weight gradients of compiled layers, and of those that recompute, that wait for their
        turn"""
        layers = self.module.computed_by
        self._checkpointed = [
            own
            for own in (module.computed_by for module in modules.values())
            if isinstance(own, CheckpointedLayers)
        ]
        """of every size, where some layers recompute"""
        compiled = layers.compiled if isinstance(layers, CheckpointedLayers) else layers
        self._defers = split and isinstance(compiled, CompiledLayers)
        self._splits = split and not self._defers
        self._watches = self._splits and not spec.whole
        # Only what a capture has fixed has the same graph every time: no loss, no module that is kept whole.
        tokens = [token for own in self._checkpointed for token in own.tokens]
        # Nor has one that names a part by a token of its own the graph of another size.
        fixed = loss is None and not spec.whole and (len(modules) == 1 or not tokens)
        self._split = SplitBackward([*self.module.parameters(), *tokens], fixed=fixed)
        self._takes_gradient = [about.requires_grad for about in spec.received]
        self._gets_gradient = [about.requires_grad for about in spec.sent]
        self._roots = [root.index for root in spec.roots]
        self._written = _written_buffers(self.module) if recompute else {}
        self._before: dict[int, dict[str, Tensor]] = {}
        """micro-batch -> buffers as they were before its forward, until it is recomputed"""

    @property
    def module(self) -> Stage:
        """The stage, for parameters and buffers, which all sizes share."""
        return next(iter(self._modules.values()))

    @property
    def weights_in_parts(self) -> list[nn.Parameter]:
        """Weights whose gradient of one micro-batch comes in several parts, as layers that recompute make it."""
        return [weight for layers in self._checkpointed for weight in layers.shared]

    @property
    def spec(self) -> Any:
        return self.module.stage_spec

    def begin(
        self,
        step: int,
        inputs: Sequence[Sequence[Any]],
        targets: Sequence[Any],
        *,
        weights: Mapping[str, Tensor] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """A global batch begins: each micro-batch's input leaves and target, empty where this stage needs none.

        `sizes` are the samples of its micro-batches; None: as planned.

        It runs with the `weights` that are given, by name, in place of the module's own; gradients go to them.
        """
        assert self.idle, "something of the last global batch was kept"
        self._step = step
        self._inputs = inputs
        self._targets = targets
        self._weights = weights or {}
        self._sizes = self._planned if sizes is None else tuple(sizes)
        self._cast = False
        for layers in self._checkpointed:
            layers.begin()
        self.peak_in_flight = 0

    def end(self) -> None:
        """The global batch is over: let go of its data."""
        self._inputs = self._targets = ()
        self._weights = {}

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self._before and not self._saved and not self._entrances

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What goes to the next stage, detached; nothing at the last stage, which keeps its loss."""
        if self.recompute:
            self._before[microbatch] = {name: buffer.clone() for name, buffer in self._written.items()}
            with self._without_graph():
                made = self._run(microbatch, received, count=True)
            self._saved.pop(microbatch, None)
            self._in_flight[microbatch] = (received, ())
        else:
            made = self._run_for_backward(microbatch, received, count=True)
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
        return () if self._loss is not None else self._sent(made)

    def _without_graph(self) -> AbstractContextManager[object]:
        """For a forward that is recomputed. The first that casts weights has a graph all the same, which is let
        go: autocast keeps its casts for all micro-batches, and gradients go back through them."""
        if self._casts and not self._cast:
            self._cast = True
            return _NOTHING
        return torch.no_grad()

    def _sent(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.sent_dtypes is None:
            return tuple(value.detach() for value in made)
        self.made_dtypes = tuple(value.dtype for value in made)
        return tuple(value.detach().to(dtype) for value, dtype in zip(made, self.sent_dtypes, strict=True))

    def compute(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As `forward`, but nothing is kept and the graph comes along: for an engine that runs backwards itself.
        The last stage returns its loss."""
        made = self._run(microbatch, received, count=True)
        if self._loss is not None or self.sent_dtypes is None:
            return made
        return tuple(value.to(dtype) for value, dtype in zip(made, self.sent_dtypes, strict=True))

    def evaluate(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As `forward`, but nothing is kept."""
        if self.forward_watch is not None:
            with torch.no_grad():
                made = self._run(microbatch, received, count=True)
            return () if self._loss is not None else self._sent(made)
        with torch.no_grad(), _evaluating(self._evaluation[self._sizes[microbatch]]):
            made = self._run(microbatch, received, count=True, modules=self._evaluation)
        return () if self._loss is not None else self._sent(made)

    def again(self, microbatch: int) -> None:
        """Recompute: the forward again, this time for the backward.

        It reads and writes copies of the buffers as they were at the first time, so it gives the same, running
        statistics count it once, and no buffer changes that the backward has kept.
        """
        received, _ = self._in_flight[microbatch]
        buffers = self._before.pop(microbatch)
        self._run_for_backward(microbatch, received, count=False, buffers=buffers)

    def _run_for_backward(
        self,
        microbatch: int,
        received: tuple[Tensor, ...],
        *,
        count: bool,
        buffers: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """What it makes is kept from now on. Of what was received only that is kept which the backward needs,
        unless that is done in two parts."""
        if self._splits:
            made = self._run(microbatch, self._tracked(received), count=count, buffers=buffers)
            self._in_flight[microbatch] = (received, made)
            return made
        entrance = self._entrances[microbatch] = Entrance()
        values = entrance.enter(received, self._takes_gradient)
        made = self._run(microbatch, values, count=count, buffers=buffers)
        self._in_flight[microbatch] = ((), made)
        return made

    def _tracked(self, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for value, wanted in zip(received, self._takes_gradient, strict=True):
            if wanted:
                value.requires_grad_()
        return received

    def _run(
        self,
        microbatch: int,
        received: tuple[Tensor, ...],
        *,
        count: bool,
        modules: Mapping[int, Stage] | None = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        module = (modules or self._modules)[self._sizes[microbatch]]
        # Not as an attribute: nn.Module takes its time over each.
        module.__dict__["rng_position"] = (self._step, microbatch)
        leaves = self._inputs[microbatch] if self._roots else ()
        values = (*received, *(self._here(leaves[index]) for index in self._roots))
        others = {**self._weights, **(buffers or {})}
        if (self._defers or (self._splits and self._checkpointed)) and modules is None:
            self._defer(module, microbatch)
        with self._watched(microbatch), self._mixed:
            if self.forward_watch is not None:
                made = self.forward_watch.run(module, values)
            else:
                made = functional_call(module, others, values) if others else module(*values)
        if self._loss is None:
            return tuple(made)
        assert self._output is not None
        target = self._targets[microbatch] if len(self._targets) else None
        leaves, tokens = (made[:-1], made[-1]) if module.stage_spec.counts_loss else (made, None)
        output = self._output(leaves)
        if self.on_output is not None:
            self.on_output(microbatch, output)
        if self.skips_loss:
            return ()
        with self._mixed:
            return (self._loss.of(output, target, microbatch, count=count, tokens=tokens),)

    def _defer(self, module: Stage, microbatch: int) -> None:
        """Say where the backward of this forward is to leave its weight gradients."""
        layers = module.computed_by
        assert isinstance(layers, (CheckpointedLayers, CompiledLayers))
        layers.deferred = self._deferred.setdefault(microbatch, []) if torch.is_grad_enabled() else None

    def _watched(self, microbatch: int) -> AbstractContextManager[None]:
        if not self._watches or not torch.is_grad_enabled():
            return _NOTHING
        saved = self._saved[microbatch] = SavedValues()
        return saved.watching()

    def _here(self, leaf: Any) -> Any:
        """An input of the model on the stage's device, where it gets only now: a global batch may be large."""
        return leaf if self._upload is None or not isinstance(leaf, Tensor) else self._upload(leaf)

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients into the parameters' `.grad`; returns the input gradients, for the stage before.

        `gradients` are for the sent values that have a gradient; what got none goes back as zeros.
        """
        received, made = self._in_flight[microbatch]
        outputs, given = self._roots_of_backward(made, gradients)
        if outputs:
            torch.autograd.backward(outputs, given)
        del self._in_flight[microbatch]
        self._saved.pop(microbatch, None)  # where only some backwards of the stage are done in two parts
        self._run_deferred(microbatch)
        entrance = self._entrances.pop(microbatch, None)
        return self._input_gradients(received) if entrance is None else entrance.gradients()

    def input_gradient(self, microbatch: int, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The first part of the backward: the input gradients, for the stage before. The micro-batch stays in
        flight."""
        assert self._splits or self._defers, "a runner must know from its forward on that a backward is split"
        received, made = self._in_flight[microbatch]
        outputs, given = self._roots_of_backward(made, gradients)
        if self._defers:
            if outputs:
                torch.autograd.backward(outputs, given)
            self._in_flight[microbatch] = ((), ())
            return self._entrances.pop(microbatch).gradients()
        wanted = [value for value in received if value.requires_grad]
        saved = self._saved.pop(microbatch, None)
        with self._deferring():
            self._delayed[microbatch] = self._split.run(outputs, given, wanted, saved=saved) if outputs else None
        self._in_flight[microbatch] = ((), ())
        input_gradients = self._input_gradients(received)
        for value in wanted:  # the graph that waits holds them by its ends, and needs nothing of them there
            value.grad = None
            if saved is not None:  # what weight gradients need of them is in its slots
                value.data = value.new_empty(0)
        return input_gradients

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        """In here layers that recompute leave their weight gradients for the second part of the backward."""
        for layers in self._checkpointed:
            layers.defers = True
        try:
            yield
        finally:
            for layers in self._checkpointed:
                layers.defers = False

    def weight_gradient(self, microbatch: int) -> None:
        """The second part of the backward: gradients into the parameters' `.grad`."""
        self._run_deferred(microbatch)
        delayed = self._delayed.pop(microbatch, None)
        if delayed is not None:
            delayed.run()
        del self._in_flight[microbatch]

    def _run_deferred(self, microbatch: int) -> None:
        """What was left for the second part of the backward; each holds what it needs no longer than that."""
        waiting = self._deferred.pop(microbatch, [])
        while waiting:
            waiting.pop(0).run()

    def _roots_of_backward(
        self, made: tuple[Tensor, ...], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """What to differentiate, and with which gradients."""
        if self._loss is not None:
            return (list(made), [None]) if made[0].requires_grad else ([], [])
        wanted = (value for value, wants in zip(made, self._gets_gradient, strict=True) if wants)
        pairs = [
            (value, gradient) for value, gradient in zip(wanted, gradients, strict=True) if value.requires_grad
        ]
        return [value for value, _ in pairs], [
            gradient if gradient.dtype == value.dtype else gradient.to(value.dtype) for value, gradient in pairs
        ]

    def _input_gradients(self, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros_like(value) if value.grad is None else value.grad
            for value, wanted in zip(received, self._takes_gradient, strict=True)
            if wanted
        )


@contextlib.contextmanager
def _evaluating(stage: Stage) -> Iterator[None]:
    """Evaluation mode for a while: modules that are kept whole are the training stage's own."""
    modes = [(module, module.training) for module in stage.modules()]
    stage.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _written_buffers(module: Stage) -> dict[str, Tensor]:
    """Buffers that a forward may write: all that are saved with the model, and no constants of the trace."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}

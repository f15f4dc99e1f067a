"""What a `Pipeline` and a `PipeDream` offer alike: the model's state on this rank, evaluation, and closing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor, nn

from bapipe.records.plan import Plan
from bapipe.records.training_record import Setting, Structure
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.action_clock import ActionClock
from bapipe.torch.runtime.evaluate_batch import evaluate_batch
from bapipe.torch.runtime.evaluation_outputs import Evaluated, OnOutput, OutputsOn
from bapipe.torch.runtime.executor import Executor
from bapipe.torch.runtime.rank_engine import Engine
from bapipe.torch.runtime.rank_loader import LoaderOptions, MapDataset, RankLoader

if TYPE_CHECKING:
    from bapipe.torch.runtime.torch_executor import TorchExecutor

__all__ = ["RankModel"]


class RankModel:
    """This rank's part of a model, over its engine; how it is trained is the subclass's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """stages, channels, watchdog and clock of this rank"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of threads and links; every rank has taken its last step. A `with` block does it."""
        self.engine.close()

    @property
    def plan(self) -> Plan:
        """What is trained by."""
        return self.engine.plan

    @property
    def rank(self) -> int:
        """This process's number in the plan."""
        return self.engine.rank

    @property
    def structure(self) -> Structure:
        """What the whole model computes, whatever its parameters are."""
        return self.engine.structure

    @property
    def precision(self) -> str:
        """What it trains in, by its word."""
        return self.engine.precision_word

    @property
    def settings(self) -> dict[str, Setting]:
        """What else this training goes by and a checkpoint records: the seed, if it has one, and the loss."""
        return dict(self.engine.settings)

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.engine.device

    @property
    def stages(self) -> tuple[int, ...]:
        """The (virtual) stages of this rank."""
        return self.engine.stages

    @property
    def steps(self) -> int:
        """Global batches trained so far."""
        return self.engine.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.engine.steps = steps

    @property
    def watch(self) -> Watch:
        """Notices ranks that fail, and lets others know if this one does."""
        return self.engine.watch

    @property
    def timeout(self) -> datetime.timedelta:
        """How long a silent rank is waited for."""
        return self.engine.timeout

    @property
    def clock(self) -> ActionClock:
        """Times what this rank does."""
        return self.engine.clock

    @property
    def executor(self) -> Executor | TorchExecutor:
        """Runs the actions of this rank."""
        return self.engine.executor

    @property
    def transport(self) -> str:
        """How tensors get to other ranks."""
        return self.engine.transport.name

    @property
    def aliases(self) -> dict[str, str]:
        """Other names in the model's state_dict -> the first name of the same tensor."""
        return self.engine.state.aliases

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages, for an optimizer."""
        return iter(self.engine.state.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the model's own names; of tied ones the first."""
        return iter(self.engine.state.parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank's stages that the model's state_dict has."""
        return self.engine.state.named_buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and saved buffers of this rank's stages, under the model's own names."""
        return self.engine.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part out of the state of the whole model."""
        self.engine.state.load_state_dict(state)

    def held(self, *, buffers_once: bool = False) -> Iterator[tuple[str, Tensor, Slice | None]]:
        """All that this rank keeps of the model's state: the first name of each tensor, and which part it is.

        A part of None is all of it. Rank 0 also has what no stage uses. With `buffers_once` only the first replica
        of a stage has its buffers: running statistics differ between replicas, each of which saw other samples.
        """
        return self.engine.state.held(buffers_once=buffers_once)

    def data_loader(
        self,
        dataset: MapDataset,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[..., Any] | None = None,
        lengths: Sequence[int] | None = None,
        **options: Any,
    ) -> RankLoader:
        """Batches of the plan's global batch for `step` and `evaluate`; each rank loads only what it needs.

        A rank needs the inputs that its stages take, and the targets if it has the last stage, of the
        micro-batches that it runs; ranks in the middle touch no sample. With a `loss_fn` the dataset, or
        `collate_fn`, gives (inputs, targets), without one the inputs of the model, which returns its loss. Every
        rank makes it with the same options; `options` are further ones of `torch.utils.data.DataLoader`, such as
        num_workers.

        Every epoch has another order with `shuffle`. `state_dict` says where in the data training stands. A short
        batch at the end is a batch of its own, unless `drop_last`.

        `lengths` are the positions of every sample's sequence, where they differ: a global batch then has samples
        of one bucket, the shortest of the pipeline's lengths that they fit in, and `collate_fn(samples, length)`
        pads them.
        """
        return RankLoader(
            dataset,
            self.engine.needs,
            self.engine.sizes,
            LoaderOptions(
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                collate_fn=collate_fn,
                lengths=lengths,
                buckets=self.engine.lengths,
            ),
            paired=self.engine.takes_targets,
            **options,
        )

    @overload
    def evaluate(self, inputs: Any, targets: Any = None) -> float: ...

    @overload
    def evaluate(self, inputs: Any, targets: Any = None, *, on_output: OnOutput) -> float: ...

    @overload
    def evaluate(
        self, inputs: Any, targets: Any = None, *, outputs: OutputsOn, on_output: OnOutput | None = None
    ) -> Evaluated: ...

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        outputs: OutputsOn | None = None,
        on_output: OnOutput | None = None,
    ) -> float | Evaluated:
        """The loss of one global batch in evaluation mode, on every rank; nothing changes.

        `outputs` asks for what the model returns, too, on `"all"` ranks or on the one of that number: an
        `Evaluated` with loss and outputs is returned then. Outputs of all micro-batches are joined, in host
        memory. `on_output(microbatch, output)` is called with those of one micro-batch as soon as they are there,
        on the rank that computes them, and nothing of them is kept. With either, targets may be left out: there is
        no loss then (None, or NaN).

        A batch may be shorter than planned. Every rank calls it alike. Raises RunError where this rank or another
        one fails, and BaPipeError, before anything runs, where the batch cannot be run.
        """
        found = evaluate_batch(self.engine, inputs, targets, outputs=outputs, on_output=on_output)
        if outputs is not None:
            return found
        return math.nan if found.loss is None else found.loss

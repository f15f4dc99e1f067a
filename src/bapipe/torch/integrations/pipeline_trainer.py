"""Hugging Face's Trainer over a `Pipeline`: every rank makes one, and each trains its own stages.

trainer = PipelineTrainer(model, "plan.json", args=PipelineArguments("out", …), train_dataset=…, eval_dataset=…)
trainer.train()

The loop, logging, evaluation with metrics, learning rates and callbacks are the Trainer's; forwards, backwards,
clipping and checkpoints are the pipeline's. To the Trainer every rank is alone: the plan spreads the global batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import BaPipeError

try:
    from transformers import Trainer, TrainingArguments
    from transformers.utils.generic import find_labels
except ImportError as error:
    raise BaPipeError(
        f"PipelineTrainer needs transformers and accelerate ({error}); pip install transformers accelerate"
    ) from error

from bapipe.records.plan import Plan
from bapipe.torch.checkpoint.checkpoints import Checkpoints
from bapipe.torch.checkpoint.whole_model import export_safetensors
from bapipe.torch.runtime.pipeline import Pipeline
from bapipe.torch.runtime.plan_checks import RunnablePlan

__all__ = ["PipelineArguments", "PipelineTrainer", "StageParameters"]

_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_FOLDER = "pipeline"
"""in the output folder: the checkpoints of all ranks"""
_PLANNED = {
    "fp16": "--precision fp16-mixed",
    "bf16": "--precision bf16-mixed",
    "tf32": "--precision tf32",
    "torch_compile": "--compile",
    "gradient_checkpointing": "a lower memory, which makes stages recompute",
    "deepspeed": "nothing: it is another engine",
    "fsdp": "nothing: it is another engine",
}
"""what a plan has instead of an argument"""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the variables by which a library would take the other ranks for copies of this one."""
    hidden = {name: os.environ.pop(name) for name in _RANKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class PipelineArguments(TrainingArguments):
    """`TrainingArguments` of one rank. Batch sizes are the plan's global batch; rank 0 alone writes and logs."""

    def __post_init__(self) -> None:
        for name, instead in _PLANNED.items():
            if getattr(self, name, None):
                raise BaPipeError(f"{name} is not for a pipeline; leave it out, and plan with {instead}")
        if self.gradient_accumulation_steps != 1:
            raise BaPipeError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, and the micro-batches of a "
                "plan accumulate already; leave it out, and plan a larger --global-batch"
            )
        if self.load_best_model_at_end:
            raise BaPipeError(
                "load_best_model_at_end is not for a pipeline; leave it out, and resume from the best checkpoint"
            )
        # Nothing of the Trainer's own runs on a GPU: the pipeline moves what its stages need.
        self.use_cpu = True
        self.dataloader_pin_memory = False
        with _alone():
            super().__post_init__()  # type: ignore[no-untyped-call]
            _ = self.device

    @property
    def process_index(self) -> int:
        """The rank in the plan, so that rank 0 alone writes."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """As `process_index`: one rank of all writes."""
        return self.process_index

    @property
    def world_size(self) -> int:
        """1: every rank sees every global batch."""
        return 1


class StageParameters(nn.Module):
    """The parameters of a rank's stages under the model's own names, for optimizers."""

    def __init__(self, pipe: Pipeline, config: Any) -> None:
        super().__init__()
        if config is not None:
            self.config = config
        for name, parameter in pipe.named_parameters():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise BaPipeError("a rank has only its stages; call train, evaluate or predict of the trainer")


class PipelineTrainer(Trainer):
    """A Trainer whose model is spread over ranks by a plan."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | RunnablePlan | str | Path,
        *,
        args: PipelineArguments,
        example: Mapping[str, Tensor] | None = None,
        pipeline_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`model` is the whole one, with the same weights on every rank, and returns its loss; this rank keeps its
        stages. `example` is a batch of its keyword arguments, by default from `train_dataset`. Further `options`
        are the Trainer's, `pipeline_options` those of `PipelineOptions`.
        """
        if not isinstance(args, PipelineArguments):
            raise BaPipeError(
                f"args is {type(args).__name__}, by which the Trainer takes other ranks for copies of this one; "
                "give PipelineArguments"
            )
        base: Any = getattr(model, "get_base_model", None)
        inner = model if base is None else base()
        args.label_names = args.label_names or find_labels(type(inner))  # type: ignore[no-untyped-call]
        with _alone():
            decayed = set(Trainer.get_decay_parameter_names(self, model))
        given = example if example is not None else _first_batch(options)
        own = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        self.pipe = Pipeline(lambda: (model, (), own), plan, None, **(pipeline_options or {}))
        """trains this rank's stages"""
        self._decayed = decayed
        self._check_batches(args)
        self._keys = tuple(own)
        self._folder = Path(str(args.output_dir)) / _FOLDER
        self._saved: Checkpoints | None = None
        with _alone():
            own_part = StageParameters(self.pipe, getattr(model, "config", None))
            super().__init__(model=own_part, args=args, **options)
        self._signature_columns: Any = list(dict.fromkeys((*self._keys, *args.label_names)))
        self.accelerator.device_placement = False

    def _check_batches(self, args: PipelineArguments) -> None:
        wanted = self.pipe.plan.global_batch
        if args.per_device_train_batch_size != wanted:
            raise BaPipeError(
                f"per_device_train_batch_size is {args.per_device_train_batch_size}, the plan is for a global "
                f"batch of {wanted}; give that, or plan another --global-batch"
            )
        if args.per_device_eval_batch_size > wanted:
            raise BaPipeError(
                f"per_device_eval_batch_size is {args.per_device_eval_batch_size}, the plan is for at most "
                f"{wanted} samples at once; give that"
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As of the whole model, whose normalisation layers are told by their classes."""
        return [name for name, _ in model.named_parameters() if name in self._decayed]

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], _items: Any = None) -> Tensor:
        """One global batch through the pipeline."""
        model.train()
        return torch.tensor(self.pipe.step(self._batch(inputs)), dtype=torch.float64)

    def _batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {key: inputs[key] for key in self._keys if key in inputs}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, outputs and labels of a batch, the same on every rank."""
        model.eval()
        batch = self._batch(inputs)
        if prediction_loss_only:
            return torch.tensor(self.pipe.evaluate(batch), dtype=torch.float64), None, None
        found = self.pipe.evaluate(batch, outputs="all")
        ignored = {*(ignore_keys or ("past_key_values",)), "loss"}
        outputs = found.outputs
        named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
        logits = tuple(value for key, value in named if key not in ignored and isinstance(value, Tensor))
        labels = tuple(inputs[name] for name in self.label_names if inputs.get(name) is not None)
        loss = None if found.loss is None else torch.tensor(found.loss, dtype=torch.float64)
        return loss, logits[0] if len(logits) == 1 else logits, labels[0] if len(labels) == 1 else labels or None

    def _clip_grad_norm(self, _model: nn.Module) -> Tensor:
        return torch.tensor(self.pipe.clip_grad_norm_(self.args.max_grad_norm))

    def _get_grad_norm(self, _model: nn.Module, grad_norm: Tensor | None = None) -> float:
        return float(self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm)

    def _checkpoints(self) -> Checkpoints:
        """Where all ranks save, made with the optimizer that the Trainer has by then."""
        if self._saved is None:
            optimizer = self.optimizer
            self._saved = Checkpoints(
                self.pipe,
                self._folder,
                optimizer=getattr(optimizer, "optimizer", optimizer),
                scheduler=self.lr_scheduler,
                keep=self.args.save_total_limit or 10**9,
            )
        return self._saved

    def _step_folder(self) -> Path:
        return self._folder / f"step-{self.pipe.steps:08d}"

    def _save_checkpoint(self, _model: nn.Module, trial: Any) -> None:
        self.store_flos()
        self._checkpoints().save()
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(folder / "trainer_state.json"))
            _keep_last(folder.parent, self.args.save_total_limit)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the optimizer, once that is made."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        step = Path(checkpoint).name.rpartition("-")[2]
        self._checkpoints().load(Path(checkpoint).resolve().parent / _FOLDER / f"step-{int(step):08d}")

    def _load_rng_state(self, _checkpoint: str | None) -> None:
        """The pipeline's checkpoint has set it."""

    def _load_scaler(self, _checkpoint: str | None) -> None:
        """There is none."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as safetensors, and its config, from what all ranks save; all ranks call it."""
        folder = Path(output_dir or str(self.args.output_dir))
        if not self._step_folder().is_dir():
            self._checkpoints().save()
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            export_safetensors(self._step_folder(), folder / "model.safetensors")
            config = getattr(self.model, "config", None)
            if config is not None:
                config.save_pretrained(folder)
        dist.barrier()

    def close(self) -> None:
        """Wait for what is being written, and let go of threads and links; every rank is done."""
        if self._saved is not None:
            self._saved.close()
        self.pipe.close()


def _first_batch(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """An example of the model's inputs: two samples of the training data, as the Trainer collates them."""
    from transformers import default_data_collator

    dataset, collate = options.get("train_dataset"), options.get("data_collator") or default_data_collator
    if dataset is None:
        raise BaPipeError("the model is captured with an example of its inputs; give train_dataset or example")
    found: Mapping[str, Any] = collate([dataset[0], dataset[1]])
    return found


def _keep_last(folder: Path, limit: int | None) -> None:
    """Remove the Trainer's notes of checkpoints that are not kept."""
    if limit is None:
        return
    numbered = sorted(folder.glob("checkpoint-*"), key=lambda item: int(item.name.rpartition("-")[2]))
    for old in numbered[:-limit]:
        (old / "trainer_state.json").unlink(missing_ok=True)
        old.rmdir()

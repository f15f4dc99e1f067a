"""How a rank goes on from a checkpoint: all that it will read is verified first, then its values are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.records.training_record import OptimizerRecord, TrainingRecord
from bapipe.torch.checkpoint.checkpoint_files import disk_words
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.checkpoint.checkpoint_reader import CheckpointReader, described_tensors
from bapipe.torch.checkpoint.tensor_pieces import Pieces
from bapipe.torch.checkpoint.training_changes import TrainingChanges, compare_trainings, continued
from bapipe.torch.checkpoint.training_state import model_pieces, optimizer_room, set_random_state

if TYPE_CHECKING:
    from bapipe.torch.runtime.pipeline import Pipeline

__all__ = ["Here", "Loaded", "Loading", "Stateful"]


class Stateful(Protocol):
    """What has a state to save: a learning-rate scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The checkpoint that training goes on from."""

    path: Path
    step: int
    """global batches trained; also in `pipe.steps`"""
    data: Any
    """what `save` was given as the position in the data"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What there is to load a checkpoint into, over all ranks."""

    tensors: frozenset[tuple[str, tuple[int, ...], str]]
    """name, shape and dtype of the whole model's parameters and saved buffers"""
    training: TrainingRecord
    """what the training is"""


class Loading:
    """One attempt to load a checkpoint, on this rank."""

    def __init__(
        self,
        pipe: Pipeline,
        path: Path,
        here: Here,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None,
        scaler: Stateful | None,
        accepted: Collection[str] = (),
    ) -> None:
        """`accepted` are the words of `CHANGES` by which something may differ from the checkpoint."""
        self._pipe, self._path, self._here = pipe, path, here
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._accepted = accepted
        self._afresh = False
        """whether the optimizer begins anew"""
        self._room: tuple[Pieces, dict[str, Any]] = ({}, {})

    @property
    def lines(self) -> list[str]:
        """What is to be said: that there was nothing to verify by, and what is not as it was at the save."""
        unverified = self._reader.unverified
        return [*([] if unverified is None else [unverified]), *self._changes.lines(self._path)]

    @property
    def optimizer(self) -> OptimizerRecord | None:
        """What training goes on with."""
        return continued(self._record, self._here.training.optimizer, self._changes)

    @property
    def loaded(self) -> Loaded:
        reader = self._reader
        return Loaded(path=self._path, step=reader.manifest.step, data=reader.small()["data"])

    def verify(self) -> None:
        """That all that this rank will read is as it was written, and of this model and training."""
        self._reader = reader = CheckpointReader(self._path)
        small = reader.small()
        self._record = reader.training()
        self._changes = changes = self._compared()
        self._afresh = changes.takes("optimizer")
        for name, target in (
            ("optimizer", self._optimizer),
            ("scheduler", self._scheduler),
            ("scaler", self._scaler),
        ):
            if target is None or name in reader.manifest.saved:
                continue
            if name == "optimizer" and "optimizer" in self._accepted:
                self._afresh = True
                continue
            raise BaPipeError(f"{self._path} was saved without {name}; save with it, or load without")
        pieces = model_pieces(self._pipe)
        reader.check(pieces)
        if {item[:2] for item in described_tensors(reader.metadata)} != {item[:2] for item in self._here.tensors}:
            raise BaPipeError(
                f"{self._path} has tensors that the model here lacks; give a checkpoint of this model"
            )
        changes.refuse(self._path)
        reader.casts = changes.takes("precision")
        reader.verify(pieces)
        if self._optimizer is not None and not self._afresh:
            with self._reading():
                self._room = optimizer_room(
                    self._pipe, self._optimizer, self._path, reader.metadata, small["groups"]
                )
            reader.verify(self._room[0])

    def _compared(self) -> TrainingChanges:
        manifest, plan = self._reader.manifest, self._pipe.plan
        if self._scheduler is not None and "learning-rate" in self._accepted:
            raise BaPipeError(
                "the learning rate is the scheduler's, so no other is taken; load without scheduler, or without "
                "accepting learning-rate"
            )
        return compare_trainings(
            self._record,
            self._here.training,
            settings={
                "the global batch": manifest.global_batch,
                "the micro-batch size": manifest.microbatch_size,
                "torch": manifest.torch,
            },
            here_settings={
                "the global batch": plan.global_batch,
                "the micro-batch size": plan.microbatch_size,
                "torch": torch.__version__,
            },
            accepted=self._accepted,
            scheduled=self._scheduler is not None,
        )

    def fill(self) -> None:
        """Take its values."""
        pipe, reader, small = self._pipe, self._reader, self._reader.small()
        pieces, _ = self._room
        reader.read({**model_pieces(pipe), **pieces})
        with self._reading():
            self._fill_optimizer()
            if self._scheduler is not None:
                self._scheduler.load_state_dict(small["scheduler"])
            if self._scaler is not None:
                self._scaler.load_state_dict(small["scaler"])
            states = small["random"]
            set_random_state(states[pipe.rank if len(states) == dist.get_world_size() else 0], pipe.device)
        pipe.steps = reader.manifest.step

    def _fill_optimizer(self) -> None:
        if self._optimizer is None:
            return
        if self._afresh:
            # Copies that it keeps of the weights are made of those that were loaded.
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": {}})
            return
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(self._room[1])
        if self._changes.takes("learning-rate"):
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """What does not suit the objects here is said in our words."""
        try:
            yield
        except BaPipeError:
            raise
        except Exception as error:
            kind = BaPipeError if self._reader.manifest.verified else CheckpointError
            raise kind(
                f"{self._path} does not suit optimizer, scheduler or scaler here: {type(error).__name__}: "
                f"{disk_words(error)}; make them as they were at the save"
            ) from error

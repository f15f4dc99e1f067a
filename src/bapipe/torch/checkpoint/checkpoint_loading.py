"""How a rank goes on from a checkpoint: all that it will read is verified first, then its values are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_files import first_line
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.checkpoint.checkpoint_reader import CheckpointReader
from bapipe.torch.checkpoint.tensor_pieces import Pieces
from bapipe.torch.checkpoint.training_state import model_pieces, optimizer_room, set_random_state

if TYPE_CHECKING:
    from bapipe.torch.runtime.pipeline import Pipeline

__all__ = ["Loaded", "Loading", "Stateful"]


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


class Loading:
    """One attempt to load a checkpoint, on this rank."""

    def __init__(
        self,
        pipe: Pipeline,
        path: Path,
        model: str,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None,
        scaler: Stateful | None,
    ) -> None:
        self._pipe, self._path, self._model = pipe, path, model
        self._optimizer, self._scheduler, self._scaler = optimizer, scheduler, scaler
        self._room: tuple[Pieces, dict[str, Any]] = ({}, {})

    @property
    def unverified(self) -> str | None:
        """A line that says that there was nothing to verify by, if so."""
        return self._reader.unverified

    @property
    def loaded(self) -> Loaded:
        reader = self._reader
        return Loaded(path=self._path, step=reader.manifest.step, data=reader.small()["data"])

    def verify(self) -> None:
        """That all that this rank will read is as it was written, and of this model."""
        self._reader = reader = CheckpointReader(self._path)
        small = reader.small()
        for name, target in (
            ("optimizer", self._optimizer),
            ("scheduler", self._scheduler),
            ("scaler", self._scaler),
        ):
            if target is not None and name not in reader.manifest.saved:
                raise BaPipeError(f"{self._path} was saved without {name}; save with it, or load without")
        reader.verify(model_pieces(self._pipe))
        if reader.model != self._model:
            raise BaPipeError(
                f"{self._path} has tensors that the model here lacks; give a checkpoint of this model"
            )
        if self._optimizer is not None:
            with self._reading():
                self._room = optimizer_room(
                    self._pipe, self._optimizer, self._path, reader.metadata, small["groups"]
                )
            reader.verify(self._room[0])

    def fill(self) -> None:
        """Take its values."""
        pipe, reader, small = self._pipe, self._reader, self._reader.small()
        pieces, state = self._room
        reader.read({**model_pieces(pipe), **pieces})
        with self._reading():
            if self._optimizer is not None:
                self._optimizer.load_state_dict(state)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(small["scheduler"])
            if self._scaler is not None:
                self._scaler.load_state_dict(small["scaler"])
            states = small["random"]
            set_random_state(states[pipe.rank if len(states) == dist.get_world_size() else 0], pipe.device)
        pipe.steps = reader.manifest.step

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
                f"{first_line(error)}; make them as they were at the save"
            ) from error

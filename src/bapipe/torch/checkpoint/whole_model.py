"""A checkpoint as the state_dict of the whole model, on one device, and as one safetensors file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.io.files import replace_file
from bapipe.records.training_record import TrainingRecord
from bapipe.torch.checkpoint.checkpoint_folder import (
    candidates,
    disk_problem,
    find_checkpoint,
    is_checkpoint,
    reason,
    refuse_unread,
)
from bapipe.torch.checkpoint.checkpoint_manifest import UnreadableCheckpointError
from bapipe.torch.checkpoint.checkpoint_reader import CheckpointReader
from bapipe.torch.checkpoint.tensor_pieces import model_key, model_name, optimizer_name, piece_of, saved_tensor

__all__ = ["CheckpointState", "export_safetensors"]

_logger = logging.getLogger(__name__)


class CheckpointState(Mapping[str, Tensor]):
    """Name -> whole tensor, put together from its parts and read when asked for; all names of the state_dict.

    A file is verified before the first value of it is used: CheckpointError.
    """

    def __init__(
        self, checkpoint: str | Path, *, pass_over: bool = False, say: Callable[[str], None] | None = None
    ) -> None:
        """One checkpoint, or a folder of them, whose last one is read.

        With `pass_over` all files are verified now, and of a folder the last checkpoint that is not damaged is
        read. `say` is called with a line for each that is passed over, and if there are no checksums; by default
        rank 0 logs a warning.
        """
        say = say or _warn
        path = Path(checkpoint)
        self._reader = _last_whole(path, say) if pass_over else CheckpointReader(find_checkpoint(path))
        if self._reader.unverified is not None:
            say(self._reader.unverified)
        self.path, self.manifest = self._reader.path, self._reader.manifest
        self._metadata = self._reader.metadata
        keys = self._metadata.state_dict_metadata
        own = [name for name in map(model_name, keys) if name is not None]
        self._names = {name: name for name in own} | self.manifest.aliases

    def __getitem__(self, name: str) -> Tensor:
        return self._read(model_key(self._names[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def training(self) -> TrainingRecord | None:
        """What the training was; None: it was saved by a version that did not record it."""
        return self._reader.training()

    def optimizer(self) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter, entry and whole tensor of the optimizer's state."""
        for key in self._metadata.state_dict_metadata:
            found = optimizer_name(key)
            if found is not None:
                yield *found, self._read(key)

    def _read(self, key: str) -> Tensor:
        about = saved_tensor(self._metadata, key)
        assert about is not None
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        self._reader.read({key: [piece_of(tensor)]})
        return tensor


def _last_whole(path: Path, say: Callable[[str], None]) -> CheckpointReader:
    """A checkpoint, or the last one of a folder, all of whose files are as they were written."""
    if is_checkpoint(path):
        reader = CheckpointReader(path)
        reader.verify_all()
        return reader
    for found in candidates(path, say):
        try:
            reader = CheckpointReader(found)
            reader.verify_all()
        except UnreadableCheckpointError as error:
            say(f"skipped a checkpoint: {reason(error)}")
        else:
            return reader
    refuse_unread(path, required=True)
    raise AssertionError("no checkpoint was found, and none was missing")


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _logger.warning("%s", text)


def export_safetensors(checkpoint: str | Path, out: str | Path) -> Path:
    """Write the whole model's state as one safetensors file, tied weights under all their names.

    The plain module takes it by `load_state_dict(strict=True)`, and `Pipeline(checkpoint=…)` reads it. The whole
    model must fit in host memory. Written whole or not at all. Returns the checkpoint that was read.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise BaPipeError("a safetensors file needs safetensors; pip install safetensors") from error
    state, target = CheckpointState(checkpoint, pass_over=True), Path(out)
    tensors = dict(state.items())
    try:
        replace_file(target, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    except Exception as error:
        raise BaPipeError(f"{target} cannot be written: {disk_problem(error, target.resolve().parent)}") from error
    return state.path

"""Weights for the stages of one rank of a model that was built without memory, and for no others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.io.files import load_json
from bapipe.records.training_record import Structure, TrainingRecord
from bapipe.torch.capturing.seeded_rng import seeded_by_place
from bapipe.torch.capturing.torch_internals import swap_parameter
from bapipe.torch.checkpoint.checkpoint_files import disk_words
from bapipe.torch.checkpoint.checkpoint_folder import checkpoints_of, is_checkpoint
from bapipe.torch.checkpoint.training_changes import structure_difference

__all__ = ["CheckpointedState", "StateFile", "fill", "initialise", "open_state", "other_structure"]

StateFile = Mapping[str, Tensor]
"""name -> tensor, read when asked for"""


@runtime_checkable
class CheckpointedState(Protocol):
    """A state that comes from a checkpoint."""

    path: Path

    def training(self) -> TrainingRecord | None: ...


def open_state(source: str | Path | Mapping[str, Tensor]) -> StateFile:
    """The state of a whole model: a mapping, a safetensors file, a folder with an index of them, or a .pt file.

    A checkpoint that `Checkpoints` wrote, or a folder of them, serves too. Of it, and of safetensors, only what is
    asked for is read.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir() and (is_checkpoint(path) or any(map(is_checkpoint, checkpoints_of(path)))):
        from bapipe.torch.checkpoint.whole_model import CheckpointState

        return CheckpointState(path)
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        if indexes:
            return _Safetensors(_indexed(indexes[0]))
        files = sorted(path.glob("*.safetensors"))
        if files:
            return _Safetensors({name: file for file in files for name in _names(file)})
        raise BaPipeError(f"{path} holds no safetensors files; give a folder or file that does")
    if not path.is_file():
        raise BaPipeError(f"there is no checkpoint {path}; correct the path")
    if path.suffix == ".safetensors":
        return _Safetensors(dict.fromkeys(_names(path), path))
    with _reading(path):
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, dict):
        raise BaPipeError(f"{path} holds a {type(loaded).__name__}, not a state_dict; save model.state_dict()")
    return loaded


def other_structure(state: StateFile, structure: Structure) -> str | None:
    """A line that says so, if the state is of a checkpoint whose model computes something else; else None.

    Weights may be taken for another model on purpose, so it is not refused.
    """
    if not isinstance(state, CheckpointedState):
        return None
    record = state.training()
    found = None if record is None else structure_difference(record.structure, structure)
    return None if found is None else f"{state.path} is of a model of another structure: {found}"


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What cannot be read is said in our words."""
    try:
        yield
    except BaPipeError:
        raise
    except Exception as error:
        raise BaPipeError(
            f"{path} cannot be read: {type(error).__name__}: {disk_words(error)}; give another file"
        ) from error


def _indexed(index: Path) -> dict[str, Path]:
    with _reading(index):
        places = load_json(index)["weight_map"]
        return {str(name): index.parent / str(file) for name, file in places.items()}


def _safe_open(path: Path) -> object:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise BaPipeError(f"reading {path.name} needs safetensors; pip install safetensors") from error
    return safe_open(path, framework="pt")


def _names(path: Path) -> list[str]:
    with _reading(path), _safe_open(path) as file:  # type: ignore[attr-defined]
        return list(file.keys())


class _Safetensors(Mapping[str, Tensor]):
    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        path = self._places[name]
        with _reading(path), _safe_open(path) as file:  # type: ignore[attr-defined]
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def fill(module: nn.Module, names: Collection[str], state: StateFile) -> None:
    """Put the state's tensors in the place of these parameters and buffers of the module."""
    aliases = _aliases(module)
    for name in sorted(names):
        found = next((alias for alias in aliases[name] if alias in state), None)
        if found is None:
            raise BaPipeError(f"the checkpoint has no '{name}'; give the state of the whole model")
        tensor, old = state[found], _tensor(module, name)
        if tensor.shape != old.shape:
            raise BaPipeError(
                f"'{name}' has shape {tuple(old.shape)}, the checkpoint has {tuple(tensor.shape)}; "
                "give the state of this model"
            )
        _place(module, aliases[name], old, tensor.to(old.dtype))


def initialise(module: nn.Module, names: Collection[str], *, seed: int) -> None:
    """Memory and fresh values for these parameters, by the modules' own `reset_parameters`.

    Each module is seeded by its path, so the values do not depend on how the model is cut; they are not those that
    building the model with memory would give.
    """
    aliases = _aliases(module)
    hollow = [name for name in sorted(names) if _tensor(module, name).is_meta]
    for name in hollow:
        old = _tensor(module, name)
        _place(module, aliases[name], old, torch.empty_like(old, device="cpu"))
    for path in sorted({name.rpartition(".")[0] for name in hollow}):
        owner = module.get_submodule(path)
        with seeded_by_place(seed, path):
            if callable(getattr(owner, "reset_parameters", None)):
                owner.reset_parameters()  # type: ignore[operator]
            elif callable(getattr(module, "_init_weights", None)):
                module._init_weights(owner)  # type: ignore[operator]
            else:
                raise BaPipeError(
                    f"'{path or type(module).__name__}' ({type(owner).__name__}) has no reset_parameters, and the "
                    "model was built without memory; give a checkpoint, or build it with memory"
                )


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """name -> all names of the same tensor."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in _state(module):
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), last)
    assert isinstance(tensor, Tensor)
    return tensor


def _place(module: nn.Module, names: Collection[str], old: Tensor, new: Tensor) -> None:
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for name in names:
        path, _, last = name.rpartition(".")
        swap_parameter(module.get_submodule(path), last, new)

"""What a training consists of, by the model's own names: tensors, the optimizer's groups, random generators."""

from __future__ import annotations

import io
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from bapipe.errors import BaPipeError, first_line
from bapipe.records.training_record import OptimizerRecord
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.checkpoint.checkpoint_files import write_hashed
from bapipe.torch.checkpoint.checkpoint_manifest import SavedFile
from bapipe.torch.checkpoint.tensor_pieces import (
    Piece,
    model_key,
    optimizer_key,
    optimizer_name,
    piece_of,
    range_pieces,
    saved_tensor,
)
from bapipe.torch.inputs.master_weights import MasterWeights

if TYPE_CHECKING:
    from bapipe.torch.runtime.pipeline import Pipeline

__all__ = [
    "joined_records",
    "model_pieces",
    "optimizer_groups",
    "optimizer_pieces",
    "optimizer_record",
    "optimizer_room",
    "random_state",
    "set_random_state",
    "write_small",
]

_NO_OPTIONS = frozenset(
    ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")
)
"""entries of a parameter group that say which parameters, or how a step is computed, and not what"""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """What a parameter of an optimizer is."""

    name: str
    """of the model's parameter"""
    part: Slice | None
    """which part of it the stage has; None: all"""
    weight: Tensor
    """what the stage has"""
    start: int | None = None
    """where replicas share the step (ZeRO-1): the first of the elements, row by row, that this rank steps;
    None: it steps all"""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the model's parameter."""
        return piece_of(self.weight, self.part).whole

    def pieces(self, state: Tensor) -> list[Piece]:
        """A state tensor of the stepped elements' shape as pieces of the whole parameter's."""
        if self.start is None:
            return [piece_of(state, self.part)]
        return range_pieces(state, self.start, self.weight.shape, self.part)


Named = dict[int, _Known]
"""by id of a parameter of the optimizer"""


def model_pieces(pipe: Pipeline, *, buffers_once: bool = False) -> dict[str, list[Piece]]:
    """This rank's parameters and saved buffers."""
    found: dict[str, list[Piece]] = {}
    for name, tensor, part in pipe.held(buffers_once=buffers_once):
        _add(found, model_key(name), piece_of(tensor, part))
    return found


def _add(found: dict[str, list[Piece]], key: str, piece: Piece) -> None:
    """One of each box: two stages of a rank may share a tensor."""
    pieces = found.setdefault(key, [])
    same = next((other for other in pieces if other.start == piece.start), None)
    if same is None:
        pieces.append(piece)
    else:
        assert same.tensor.data_ptr() == piece.tensor.data_ptr(), f"{key} is here twice"


def _named(pipe: Pipeline) -> Named:
    shards = pipe.engine.shards
    known: Named = {}
    for name, tensor, part in pipe.held():
        if not isinstance(tensor, nn.Parameter):
            continue
        known[id(tensor)] = _Known(name=name, part=part, weight=tensor)
        for own in shards.stepped([tensor]):
            shard = shards.shard(own)
            if shard is not None:
                known[id(own)] = _Known(name=name, part=part, weight=tensor, start=shard.start)
    return known


def _of(known: Named, parameter: Tensor) -> _Known:
    found = known.get(id(parameter))
    if found is None:
        raise BaPipeError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of this rank's "
            "stages; make it with pipe.parameters()"
        )
    return found


def optimizer_pieces(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, list[Piece]]:
    """The optimizer's state tensors, by parameter.

    One that has its parameter's shape is cut as the parameter is. Anything else that belongs to a part of a
    parameter must be one number, the same for all parts, such as the count of its optimizer steps.
    """
    found: dict[str, list[Piece]] = {}
    if optimizer is None:
        return found
    known = _named(pipe)
    for parameter, state in optimizer.state.items():
        own = _of(known, parameter)
        for entry, value in state.items():
            if not isinstance(value, Tensor):
                continue
            alike = value.shape == parameter.shape
            if own.part is not None and not alike and value.numel() != 1:
                raise BaPipeError(
                    f"'{entry}' of '{own.name}' has shape {tuple(value.shape)} where the stage has "
                    f"{own.part.size} of {own.part.of} channels: it cannot be saved by the model's names; plan "
                    "without split layers, or use an optimizer whose state has the parameter's shape"
                )
            for piece in own.pieces(value) if alike else [piece_of(value)]:
                _add(found, optimizer_key(own.name, entry), piece)
    return found


def optimizer_groups(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Options of each parameter group, the names of its parameters, and state of them that is no tensor."""
    if optimizer is None:
        return []
    known = _named(pipe)
    groups = []
    for group in optimizer.param_groups:
        names = {_of(known, parameter).name: parameter for parameter in group["params"]}
        plain = {
            name: {key: value for key, value in optimizer.state[item].items() if not isinstance(value, Tensor)}
            for name, item in names.items()
            if item in optimizer.state
        }
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"options": options, "names": list(names), "plain": plain})
    return groups


def optimizer_record(optimizer: torch.optim.Optimizer | None) -> OptimizerRecord | None:
    """Class and options of an optimizer, whatever parameters it has; None where there is none."""
    if optimizer is None:
        return None
    masters = isinstance(optimizer, MasterWeights)
    kind = type(optimizer.stepped_by if isinstance(optimizer, MasterWeights) else optimizer)
    options: dict[str, tuple[str, ...]] = {"master_weights": (str(masters),)}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in _NO_OPTIONS:
                options[name] = tuple(sorted({*options.get(name, ()), _shown(value)}))
    return OptimizerRecord(name=f"{kind.__module__}.{kind.__qualname__}", options=options)


def joined_records(records: Sequence[OptimizerRecord | None]) -> OptimizerRecord | None:
    """One for all ranks, of which each has its own parameters and groups."""
    known = [record for record in records if record is not None]
    if not known:
        return None
    options: dict[str, tuple[str, ...]] = {}
    for record in known:
        for name, values in record.options.items():
            options[name] = tuple(sorted({*options.get(name, ()), *values}))
    return OptimizerRecord(name=", ".join(sorted({record.name for record in known})), options=options)


def _shown(value: Any) -> str:
    return _ADDRESS.sub("", repr(value.tolist() if isinstance(value, Tensor) else value))[:200]


def optimizer_room(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    checkpoint: Path,
    metadata: Metadata,
    groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, list[Piece]], dict[str, Any]]:
    """Memory for the saved state of the optimizer's parameters, and the state_dict, with saved options, around it.

    Groups may hold other parameters than when they were saved, as each rank has its own; but parameters of one
    group must have been saved with the same options.
    """
    known = _named(pipe)
    saved = {name: group for group in groups for name in group["names"]}
    entries: dict[str, list[str]] = {}
    for key in metadata.state_dict_metadata:
        found = optimizer_name(key)
        if found is not None:
            entries.setdefault(found[0], []).append(found[1])
    pieces: dict[str, list[Piece]] = {}
    state: dict[int, dict[str, Any]] = {}
    filled = optimizer.state_dict()
    for number, (group, described) in enumerate(zip(optimizer.param_groups, filled["param_groups"], strict=True)):
        options = groups[number]["options"] if number < len(groups) and not group["params"] else None
        for index, parameter in zip(described["params"], group["params"], strict=True):
            this = _of(known, parameter)
            name = this.name
            if name not in saved:
                raise BaPipeError(f"{checkpoint} has no optimizer state of '{name}'; give one of this training")
            options = options or saved[name]["options"]
            if saved[name]["options"] != options:
                raise BaPipeError(
                    f"'{name}' was saved with other options than the rest of its parameter group; make the "
                    "optimizer's groups as they were at the save"
                )
            own = dict(saved[name]["plain"].get(name, {}))
            for entry in entries.get(name, ()):
                own[entry] = _room(parameter, this, metadata, entry, pieces)
            if own:
                state[index] = own
        described.update(options or {})
    return pieces, {**filled, "state": state}


def _room(
    parameter: Tensor, known: _Known, metadata: Metadata, entry: str, pieces: dict[str, list[Piece]]
) -> Tensor:
    """Memory for a state tensor of a parameter, to be filled from its place in the saved one."""
    key = optimizer_key(known.name, entry)
    about = saved_tensor(metadata, key)
    assert about is not None
    # Of a weight that is one number, the count of its steps has the weight's shape too.
    alike = tuple(about.size) == known.whole and (known.start is None or known.whole != () or entry != "step")
    shape = parameter.shape if alike else about.size
    room = torch.empty(shape, dtype=about.properties.dtype, device=parameter.device if alike else "cpu")
    for piece in known.pieces(room) if alike else [piece_of(room)]:
        _add(pieces, key, piece)
    return room


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch's generators, Python's, and numpy's if it is in use."""
    version, internal, gauss = random.getstate()
    found: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """What `random_state` returned, as far as there is such a generator here."""
    torch.set_rng_state(state["cpu"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))


def write_small(values: Mapping[str, Any], path: Path) -> SavedFile:
    """Plain values and tensors into one file, on disk when this returns; BaPipeError if they could not be read."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(values), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise BaPipeError(
            f"the state of scheduler, scaler, data or optimizer groups holds what cannot be saved "
            f"({first_line(error)}); use plain values and tensors"
        ) from error
    size, sha256 = write_hashed(path, buffer.getbuffer())
    return SavedFile(size=size, sha256=sha256)

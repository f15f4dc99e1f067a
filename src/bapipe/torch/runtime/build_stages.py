"""From a plan and a captured model to the stages of one rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import Precision
from bapipe.records.plan import Plan, PlanStage
from bapipe.records.training_record import Structure
from bapipe.schedule.actions import Schedule
from bapipe.torch.capturing import Captured, Stage, capture
from bapipe.torch.capturing.crossing_values import Value, dims_of
from bapipe.torch.capturing.loss_graph import OwnLoss, own_loss
from bapipe.torch.capturing.torch_internals import flatten_recurrent, swap_parameter, unflatten
from bapipe.torch.comm import Message, TensorShape
from bapipe.torch.compiling.compiled_layers import CompiledPrograms, StageLayers, warm_up
from bapipe.torch.device.dtypes import weights_dtype
from bapipe.torch.inputs.build_model import module_and_example
from bapipe.torch.runtime.materialise import fill, initialise, open_state, other_structure
from bapipe.torch.runtime.microbatches import InputSpec
from bapipe.torch.stage.activation_checkpoints import checkpoint_layers

__all__ = [
    "Build",
    "OwnStages",
    "StagesBySize",
    "check_model",
    "materialise_stages",
    "other_names",
    "own_stages",
    "parts_of",
    "planned_model",
    "stage_parameters",
    "unused_state",
]

_logger = logging.getLogger(__name__)
_ROUNDING = 0.01
"""relative difference of shares that weights of other dtypes and buffers make"""
Build = Callable[[], Any]
"""makes (module, args) or (module, args, kwargs) with an example of the module's inputs"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnStages:
    """All that a rank keeps of the model."""

    stages: Mapping[int, Mapping[int, Stage]]
    """stage -> micro-batch size -> module; the sizes share parameters and buffers"""
    evaluation: Mapping[int, Mapping[int, Stage]]
    """the same for evaluation, with the same parameters and buffers; modules that are kept whole are those of the
    training stages, so `eval()` is for the time of an evaluation only"""
    messages: dict[tuple[int, int], Message]
    """(boundary, micro-batch size) -> what crosses it"""
    crossing: Mapping[int, tuple[Value, ...]]
    """boundary -> the values that cross it, for sizes that have no message yet"""
    differentiable: Mapping[int, tuple[bool, ...]]
    """boundary -> for which values a gradient comes back"""
    inputs: InputSpec
    needed: frozenset[int]
    """input leaves that this rank's stages take from the data"""
    output: Callable[[Sequence[Any]], Any]
    """puts the last stage's leaves together as the model returns them"""
    loss: OwnLoss | None
    """what the model returns as its loss, if anything"""
    sample_dims: tuple[int | None, ...]
    """per leaf of what the model returns, the dimension that counts samples"""
    taking: tuple[int, ...]
    """of this rank's stages, those that take inputs from the data"""
    any_size: bool
    """whether micro-batches of any size run; False: only those of the plan"""

    def message(self, boundary: int, size: int, onward: bool) -> Message:
        message = self.messages.get((boundary, size))
        if message is None:
            message = self.messages[boundary, size] = self._of_size(boundary, size)
        if onward:
            return message
        wanted = self.differentiable[boundary]
        return tuple(about for about, gradient in zip(message, wanted, strict=True) if gradient)

    def _of_size(self, boundary: int, size: int) -> Message:
        """What crosses with a size that was not planned, in the dtypes of those that were."""
        known = next(message for (place, _), message in self.messages.items() if place == boundary)
        return tuple(
            TensorShape(shape=value.shape(size), dtype=about.dtype)
            for value, about in zip(self.crossing[boundary], known, strict=True)
        )

    def set_dtypes(self, boundary: int, dtypes: Sequence[torch.dtype]) -> None:
        """From now on values cross that boundary in these dtypes."""
        for key, message in self.messages.items():
            if key[0] == boundary:
                self.messages[key] = tuple(
                    replace(about, dtype=dtype) for about, dtype in zip(message, dtypes, strict=True)
                )


class StagesBySize(dict[int, Stage]):
    """A stage by micro-batch size. One that runs with any size serves those that were not planned, too."""

    def __init__(self, stages: Mapping[int, Stage], *, free: bool) -> None:
        super().__init__(stages)
        self._free = free

    def __missing__(self, size: int) -> Stage:
        if not self._free:
            raise KeyError(size)
        self[size] = found = next(iter(self.values()))
        return found


def planned_model(
    build_model: Build | Captured,
    plan: Plan,
    seed: int | None,
    precision: Precision | None = None,
    autocast: torch.dtype | None = None,
) -> Captured:
    """The plan's model, captured: as it was built, or as `build_model` makes it. Refuses another model."""
    if isinstance(build_model, Captured):
        captured = build_model
    else:
        if seed is not None:
            torch.manual_seed(seed)
        module, args, kwargs = module_and_example(build_model(), "build_model")
        if args is None:
            raise BaPipeError(
                "build_model returns a module without an example of its inputs; return (module, args) or "
                "(module, args, kwargs)"
            )
        captured = capture(module, args, kwargs, check=plan.model.fingerprint is None)
    check_model(captured, plan, precision, autocast)
    return captured


def check_model(
    captured: Captured, plan: Plan, precision: Precision | None = None, autocast: torch.dtype | None = None
) -> None:
    """Refuse a module that is not the one that was planned, by fingerprint, by its layers' names and by dtype.

    `precision` is what it trains in, by default the plan's, `autocast` the dtype that its forwards are cast to.
    """
    ref, found = plan.model.ref or plan.model.name, captured.fingerprint
    names = tuple(layer.name for layer in captured.layers)
    planned = tuple(dict.fromkeys(item for stage in plan.stages for item in _numbered(stage.first_layer, stage)))
    planned_names = tuple(name for _, name in planned)
    if planned_names != names:
        pairs = zip((*planned_names, "nothing"), (*names, "nothing"), strict=False)
        here, there = next((a, b) for a, b in pairs if a != b)
        raise BaPipeError(
            f"the plan has {len(planned_names)} layers and '{ref}' {len(names)}: where the plan has '{here}' the "
            f"model has '{there}'; profile and plan it again"
        )
    if plan.model.fingerprint is not None and found != plan.model.fingerprint:
        raise BaPipeError(
            f"'{ref}' builds a model with fingerprint {found}, but the plan is of {plan.model.fingerprint}: "
            "its layers or parameters have changed; profile and plan it again"
        )
    _check_dtype(captured, precision or plan.precision, autocast)
    _check_frozen(captured, plan)
    _check_parts(captured, plan)


def _numbered(first: int, stage: PlanStage) -> list[tuple[int, str]]:
    """Layers by number, so that one that is split between stages counts once."""
    return [(first + offset, name) for offset, name in enumerate(stage.layers)]


def _check_dtype(captured: Captured, precision: Precision, autocast: torch.dtype | None) -> None:
    """Parameters have the precision's dtype, or fp32 where they run under autocast to that."""
    wanted = weights_dtype(precision)
    allowed = {wanted, torch.float32} if autocast == wanted else {wanted}
    for name, parameter in captured.module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            found = str(parameter.dtype).removeprefix("torch.")
            raise BaPipeError(
                f"the plan is for {precision.word}, but '{name}' is {found}; convert the model, run it under "
                "autocast (autocast=), or plan it as it is"
            )


def _check_frozen(captured: Captured, plan: Plan) -> None:
    """Refuse a model of which more is trained than was planned; a plan that counts all as trained has room."""
    if all(stage.trainable_bytes is None for stage in plan.stages):
        return
    pairs = list(zip(captured.layers, captured.to_model().layers, strict=True))
    for index, stage in enumerate(plan.stages):
        if stage.trainable_bytes is None or not stage.weight_bytes or stage.fractions:
            continue
        own = pairs[stage.first_layer : stage.last_layer + 1]
        single = [layer for layer, known in own if known.shares_weights_with is None]
        copied = [layer for layer, known in own if known.shares_weights_with in stage.tied]
        # Plans of before count no copies of weights that another stage holds.
        found = min(
            sum(layer.trainable_bytes for layer in held) / max(1, sum(layer.weight_bytes for layer in held))
            for held in (single, [*single, *copied])
        )
        planned = stage.trainable_bytes / stage.weight_bytes
        if found > (1 + _ROUNDING) * planned:
            raise BaPipeError(
                f"the plan has {planned:.3%} of the weights of stage {index} trained, but of "
                f"'{plan.model.ref or plan.model.name}' {found:.3%} require a gradient; freeze the same "
                "parameters, or profile and plan it again"
            )


def parts_of(stage: PlanStage) -> dict[int, tuple[int, int]]:
    """Layers of which a stage has only some channels -> from where to where."""
    return {part.layer: (part.start, part.stop) for part in stage.fractions}


def stage_parameters(captured: Captured, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameter -> the stages that hold it whole. Slices, of which each stage has another, are left out."""
    found: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        parts = parts_of(stage)
        for layer in range(stage.first_layer, stage.last_layer + 1):
            whole, _ = captured.held(layer, parts.get(layer))
            for name in sorted(whole):
                if index not in found.setdefault(name, []):
                    found[name].append(index)
    return {name: tuple(stages) for name, stages in found.items()}


def other_names(module: nn.Module) -> dict[str, str]:
    """Names in the module's state_dict of tensors that have an earlier one -> that one, which stages use."""
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    names = ((name, first.get(id(tensor), name)) for name, tensor in module.state_dict(keep_vars=True).items())
    return {name: known for name, known in names if name != known}


def unused_state(captured: Captured) -> dict[str, Tensor]:
    """What of the module's state_dict no layer uses, and so no stage holds; what has no memory is left out."""
    used = {name for layer in captured.layers for name in (*layer.parameters, *layer.buffers)}
    others = other_names(captured.module)
    return {
        name: tensor
        for name, tensor in captured.module.state_dict().items()
        if isinstance(tensor, Tensor)
        and not tensor.is_meta
        and others.get(name, name) not in used
        and name not in others
    }


def _check_parts(captured: Captured, plan: Plan) -> None:
    """Refuse parts of a layer that does not divide so, or that leave a gap."""
    done: dict[int, int] = {}
    for stage in plan.stages:
        for part in stage.fractions:
            split = captured.layers[part.layer].split
            if split is None or split.channels != part.of or part.start != done.get(part.layer, 0):
                way = "not at all" if split is None else f"into {split.channels} {split.by}"
                raise BaPipeError(
                    f"the plan has {part.start} to {part.stop} of {part.of} of layer {part.layer} after "
                    f"{done.get(part.layer, 0)}, but it divides {way}; profile and plan again"
                )
            done[part.layer] = part.stop


def materialise_stages(
    captured: Captured,
    plan: Plan,
    stages: Sequence[int],
    checkpoint: str | Path | Mapping[str, Tensor] | None,
    seed: int,
    structure: Structure,
) -> None:
    """Weights for a rank's stages, where they come from a checkpoint or have no memory yet.

    The first stage's rank logs a warning where the checkpoint is of a model of another structure.
    """
    parts = [plan.stages[index] for index in stages]
    own = [layer for part in parts for layer in captured.layers[part.first_layer : part.last_layer + 1]]
    parameters = {name for layer in own for name in layer.parameters}
    if checkpoint is not None:
        saved = captured.module.state_dict()
        buffers = {name for layer in own for name in layer.buffers if name in saved}
        state = open_state(checkpoint)
        other = other_structure(state, structure)
        if other is not None and 0 in stages:
            _logger.warning("%s", other)
        fill(captured.module, parameters | buffers, state)
    else:
        initialise(captured.module, parameters, seed=seed)


def own_stages(
    captured: Captured,
    plan: Plan,
    schedule: Schedule,
    *,
    rank: int,
    sizes: Sequence[int],
    device: torch.device,
    programs: CompiledPrograms | None = None,
    store: dict[tuple[str, int, int], Tensor] | None = None,
) -> OwnStages:
    """The stages of a rank, on its device, and what crosses every boundary; with `programs` their layers run
    compiled. Forms of the same stages for other sequences share a `store` of parts of weights."""
    captures = {size: captured.at(size) for size in sorted(set(sizes))}
    store = {} if store is None else store
    stages, evaluation = (
        {
            index: StagesBySize(
                {
                    size: _stage(one, plan.stages[index], store, device=device, training=training)
                    for size, one in captures.items()
                },
                free=captured.dynamic,
            )
            for index in schedule.stages_of(rank)
        }
        for training in (True, False)
    )
    for by_size in stages.values():
        flatten_recurrent(captured.module, dict(next(iter(by_size.values())).named_parameters()))
    if programs is not None:
        for index, by_size in stages.items():
            for size, stage in by_size.items():
                _compile(stage, captures[size], plan.stages[index], store, programs)
                warm_up(stage, captures[size], size, device)
    for index, by_size in stages.items():
        runs = [(run.first, run.last) for run in plan.stages[index].recompute_layers]
        for size, stage in by_size.items() if runs else ():
            checkpoint_layers(stage, captures[size], _layers(plan.stages[index], store), runs, device)
    messages, differentiable, crossing = {}, {}, {}
    for boundary, part in enumerate(plan.stages[:-1]):
        for size, one in captures.items():
            values = one.crossing(part.last_layer, parts_of(part).get(part.last_layer, (0, None))[1])
            messages[boundary, size] = tuple(
                TensorShape(shape=value.shape(size), dtype=value.dtype) for value in values
            )
            differentiable[boundary] = tuple(value.requires_grad for value in values)
            crossing[boundary] = values
    specs = {index: [stage.stage_spec for stage in by_size.values()] for index, by_size in stages.items()}
    return OwnStages(
        stages=stages,
        evaluation=evaluation,
        messages=messages,
        differentiable=differentiable,
        inputs=InputSpec.of(captured),
        needed=frozenset(root.index for found in specs.values() for spec in found for root in spec.roots),
        crossing=crossing,
        output=functools.partial(_unflatten, captured.program.out_spec),
        loss=own_loss(captures[sizes[0]].program),
        sample_dims=tuple(_sample_dim(captured, leaf) for leaf in captured.program.outputs),
        taking=tuple(index for index, found in specs.items() if any(spec.roots for spec in found)),
        any_size=captured.dynamic,
    )


def _stage(
    captured: Captured,
    part: PlanStage,
    store: dict[tuple[str, int, int], Tensor],
    *,
    device: torch.device,
    training: bool,
) -> Stage:
    """A stage on its device. The model's buffers go there with it, so that its forms for other sizes and for
    evaluation, which are built after it, have the same ones; parameters are moved in place."""
    first, last, parts = part.first_layer, part.last_layer, parts_of(part)
    stage = captured.stage(
        first, last, parts=parts, store=store, device=device, training=training, count_loss=True
    ).to(device)
    of_model = {name for name, _ in captured.module.named_buffers()}
    for name, buffer in stage.named_buffers():
        if name in of_model and name not in stage.stage_slices:
            path, _, own = name.rpartition(".")
            swap_parameter(captured.module.get_submodule(path), own, buffer)
    return stage


def _compile(
    stage: Stage,
    captured: Captured,
    part: PlanStage,
    store: dict[tuple[str, int, int], Tensor],
    programs: CompiledPrograms,
) -> None:
    programs.attach(stage, captured, _layers(part, store))


def _layers(part: PlanStage, store: dict[tuple[str, int, int], Tensor]) -> StageLayers:
    return StageLayers(
        first=part.first_layer, last=part.last_layer, parts=parts_of(part), store=store, count_loss=True
    )


def _sample_dim(captured: Captured, leaf: Any) -> int | None:
    """The dimension of an output that counts samples, if any does."""
    value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
    if not isinstance(value, Tensor):
        return None
    return next((index for index, (slope, _) in enumerate(dims_of(captured.program, value)) if slope), None)


def _unflatten(spec: Any, leaves: Sequence[Any]) -> Any:
    return unflatten(leaves, spec)

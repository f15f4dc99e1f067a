"""`capture`: from an nn.Module to consecutive layers that can be planned, cut and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.io.files import content_hash
from bapipe.models.layers import Model
from bapipe.torch.capturing.crossing_values import Value, crossing, value_of
from bapipe.torch.capturing.describe import CapturedLayer, describe_layers, to_layer
from bapipe.torch.capturing.export import Examples, examples_of, export_module
from bapipe.torch.capturing.layer_division import required_rule
from bapipe.torch.capturing.layer_groups import Group, group_layers
from bapipe.torch.capturing.linearise import Program, linearise
from bapipe.torch.capturing.module_state import on_meta
from bapipe.torch.capturing.part_graph import partial_values
from bapipe.torch.capturing.self_check import self_check
from bapipe.torch.capturing.stage_module import Stage, build_stage
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.capturing.trace_hazards import Finding

__all__ = ["Captured", "capture"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A module as consecutive layers."""

    module: nn.Module
    layers: tuple[CapturedLayer, ...]
    dynamic: bool
    """whether any number of samples runs; False: only `batch`, see `at`"""
    batch: int
    """samples of the example"""
    opaque: tuple[Finding, ...]
    """leaf modules: called as they stand instead of traced, and why"""
    notes: tuple[str, ...]
    """what a user should know of the capture"""
    checked: float | None
    """the largest relative difference from eager that the self-check saw; None: not checked"""
    unused: tuple[str, ...]
    """parameters that no layer uses"""
    program: Program
    groups: tuple[Group, ...]
    examples: Examples

    @property
    def fingerprint(self) -> str:
        """Hash of layer names and of parameter names and shapes; the same for every dtype and torch version."""
        parameters = [[name, list(parameter.shape)] for name, parameter in self.module.named_parameters()]
        return content_hash({"layers": [layer.name for layer in self.layers], "parameters": parameters})

    def to_model(self, name: str | None = None) -> Model:
        """The layer table that the planner takes; sizes per sample, in elements."""
        layers = tuple(to_layer(layer, self.layers[:index]) for index, layer in enumerate(self.layers))
        inputs = sum(
            leaf.numel() / self.examples.batch
            for leaf, batched in zip(self.examples.leaves, self.examples.batched, strict=True)
            if batched
        )
        title = type(self.module).__name__
        return Model(
            name=name or title.lower(),
            layers=layers,
            input_elements=inputs,
            description=f"{title}, captured with {self.batch} samples",
        )

    def crossing(self, layer: int, done: int | None = None) -> tuple[Value, ...]:
        """Values that cross a cut after that layer, or after the first `done` channels of it."""
        if done is None:
            return self.layers[layer].sent
        group = self.groups[layer]
        rule = required_rule(self.program, group)
        if done == rule.channels:
            return self.layers[layer].sent
        before = (value_of(self.program, node) for node in crossing(self.program, group.start))
        return (*before, *partial_values(self.program, rule, done))

    def held(self, layer: int, part: tuple[int, int] | None = None) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters that a stage with (a part of) the layer holds whole, and those it holds a slice of."""
        names = frozenset(self.layers[layer].parameters)
        if part is None:
            return names, frozenset()
        rule = required_rule(self.program, self.groups[layer])
        sliced = {item for step in rule.steps.values() for item in step.slices if item in self.program.state}
        own = names - {self.program.state[item] for item in sliced}
        if rule.by == "directions":
            weights: Any = rule.anchor.args[2]
            each = len(weights) // 2
            others = [item for index, item in enumerate(weights) if not part[0] <= index // each < part[1]]
            own -= {self.program.state[item] for item in others}
        return own, names & {self.program.state[item] for item in sliced}

    def stage(
        self,
        first: int,
        last: int,
        *,
        parts: Mapping[int, tuple[int, int]] | None = None,
        store: dict[tuple[str, int, int], Tensor] | None = None,
        device: torch.device | None = None,
        training: bool = True,
        count_loss: bool = False,
    ) -> Stage:
        """Layers `first` to `last` (included) as a module that runs alone; `StageSpec` says what goes in and out.

        Parameters and buffers are the model's own objects under the model's own names (of tied ones the first), so
        `fill_stage` fills a stage of a model that was captured without memory from the model's state. `device`
        replaces the device that the trace has constants for; move the stage there too. Without `training` dropout
        is off and batch-norm uses its running statistics.

        `parts` says of which layers at its ends the stage has only channels start to stop (see `Layer.split`).
        Such a stage has copies of slices of the weights; stages that are given the same `store` share them.

        With `count_loss` the last stage also returns what the model's own loss is a mean over, where that is
        labels that are not ignored or a mask (`StageSpec.counts_loss`).
        """
        if not 0 <= first <= last < len(self.layers):
            raise BaPipeError(
                f"a stage goes from layer 0 to {len(self.layers) - 1} at most, got {first} to {last}; correct it"
            )
        return build_stage(
            self.program,
            self.module,
            layers=(first, last),
            groups=self.groups,
            parts=parts or {},
            store={} if store is None else store,
            device=device,
            training=training,
            count_loss=count_loss,
        )

    def input_leaves(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Inputs of the model taken apart, as `Root.index` counts them."""
        given = dict(kwargs or {})
        if given.keys() != set(self.examples.keywords):
            wanted = ", ".join(self.examples.keywords) or "none"
            raise BaPipeError(
                f"the model was captured with the keyword arguments {wanted}, got {', '.join(given) or 'none'}; "
                "give the same"
            )
        leaves, _ = flatten((tuple(args), {key: given[key] for key in self.examples.keywords}))
        if len(leaves) != len(self.program.inputs):
            raise BaPipeError(
                f"the model was captured with {len(self.program.inputs)} inputs, got {len(leaves)}; "
                "give args and kwargs of the same structure"
            )
        return leaves

    def output(self, leaves: Sequence[Any]) -> Any:
        """What the last stage returned, as the model returns it."""
        return unflatten(leaves, self.program.out_spec)

    def at(self, batch: int) -> Captured:
        """The capture to run this many samples with: this one, or a new one where the batch is not free."""
        if self.dynamic or batch == self.batch:
            return self
        args, kwargs = self.examples.resized(batch).tree()
        return capture(self.module, args, kwargs, dynamic_batch=False, check=self.checked is not None)

    def of_length(self, length: int) -> Captured:
        """The capture to run sequences of this length with: this one, or a new one of the same module.

        Raises BaPipeError where the inputs have no sequences, or the model does not take them so long.
        """
        if self.examples.length is None:
            raise BaPipeError(
                "the example inputs have no sequences: no tensor of them has a second dimension; leave lengths out"
            )
        if length == self.examples.length:
            return self
        args, kwargs = self.examples.of_length(length).tree()
        found = capture(self.module, args, kwargs, dynamic_batch=self.dynamic, check=self.checked is not None)
        if [layer.name for layer in found.layers] != [layer.name for layer in self.layers]:
            raise BaPipeError(
                f"with sequences of {length} the model has other layers than with {self.examples.length}; plan "
                "each length by itself"
            )
        return found


def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    check: bool = True,
) -> Captured:
    """Trace a module in training mode and group what it computes into layers.

    `args` and `kwargs` are an example of its inputs; the first dimension of the first tensor counts samples, as
    does every other first dimension of that size. Where the model allows it one capture serves any number of
    samples. Parameters may lie on the meta device: nothing is allocated (and nothing can be checked). With `check`
    the layers are run against eager, see `self_check`. The module is left as it was.

    Raises BaPipeError if the model cannot be traced, naming operation and module, or differs from eager.
    """
    if not isinstance(module, nn.Module):
        raise BaPipeError(f"capture takes an nn.Module, got {type(module).__name__}; pass the model itself")
    if isinstance(args, Tensor) or not isinstance(args, (tuple, list)):
        raise BaPipeError(f"args must be a tuple of the model's inputs, got {type(args).__name__}; write (x,)")
    modes = {path: item.training for path, item in module.named_modules()}
    if not module.training:
        module.train()
    try:
        return _capture(module, tuple(args), dict(kwargs or {}), dynamic_batch, check)
    finally:
        for path, item in module.named_modules():
            item.training = modes.get(path, item.training)


def _capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool, check: bool
) -> Captured:
    examples = examples_of(args, kwargs)
    exported = export_module(module, examples, dynamic=dynamic_batch)
    program = linearise(exported, module)
    groups = group_layers(program, module)
    layers = describe_layers(program, module, groups)
    used = {name for layer in layers for name in layer.parameters}
    notes = [f"'{item.path}' is kept as a leaf module: {item.reason}" for item in exported.findings]
    if exported.layerdrop_draws:
        notes.append(f"layer drop is off: {exported.layerdrop_draws} draws of torch.rand([]) are answered with 1")
    if exported.left_out:
        notes.append(f"left out of the output: {', '.join(sorted(set(exported.left_out)))}")
    if dynamic_batch and not exported.dynamic:
        notes.append(f"the model fixes its batch: this capture serves {exported.examples.batch} samples only")
    hollow = on_meta(module)
    if hollow:
        notes.append("parameters lie on the meta device: not checked against eager")

    def made(checked: float | None) -> Captured:
        return Captured(
            module=module,
            layers=layers,
            dynamic=exported.dynamic,
            batch=exported.examples.batch,
            opaque=exported.findings,
            notes=tuple(notes),
            checked=checked,
            unused=tuple(name for name, _ in module.named_parameters() if name not in used),
            program=program,
            groups=groups,
            examples=exported.examples,
        )

    captured = made(None)
    return made(self_check(captured, exported.examples)) if check and not hollow else captured

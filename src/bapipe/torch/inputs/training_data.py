"""Global batches to train on: what `make_batch` makes, samples of the example, or scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError, nearest
from bapipe.torch.capturing.export import examples_of
from bapipe.torch.capturing.torch_internals import flatten, register_dataclasses, unflatten
from bapipe.torch.inputs.build_model import BuiltModel

__all__ = ["DATA", "Batches", "batches_for", "require_targets"]

DATA = ("synthetic", "digits")
_PIXELS = 64


Batches = Callable[[int], tuple[Any, Any]]
"""step -> (inputs, target); always the same, on every rank and however the model is cut"""


def batches_for(built: BuiltModel, data: str, *, global_batch: int, seed: int) -> Batches:
    """Global batches for a model; floating inputs have the dtype of its example."""
    if data == "digits":
        return _digits(built, global_batch, seed)
    if data != "synthetic":
        raise BaPipeError(f"unknown data '{data[:40]}'{nearest(data, DATA)}; known: {', '.join(DATA)}")
    if built.make_batch is None:
        return _of_example(built, global_batch, seed)
    make_batch = built.make_batch

    def make(step: int) -> tuple[Any, Any]:
        inputs, target = built.as_call(make_batch(seed + 1 + step, global_batch))
        _check_samples(built, (inputs, target), global_batch)
        return _as_example(built, inputs), target

    return make


def require_targets(built: BuiltModel) -> None:
    """Refuse a loss function without batches that have targets for it."""
    if built.loss is not None and built.make_batch is None:
        raise BaPipeError(
            f"'{built.where}' has a loss function but no targets for it; add make_batch(seed, size) -> "
            "(inputs, target)"
        )


def _check_samples(built: BuiltModel, batch: Any, global_batch: int) -> None:
    """Refuse a batch of which no tensor has the samples that were asked for."""
    tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    wrong = [leaf for leaf in tensors if len(leaf) != global_batch]
    if len(wrong) == len(tensors):
        got = f"shape {tuple(wrong[0].shape)}" if wrong else "no tensor"
        raise BaPipeError(f"{built.where}.make_batch was asked for {global_batch} samples, got {got}")


def _leaves(batch: Any) -> list[Any]:
    register_dataclasses(batch)
    return flatten(_plain(batch))[0]


def _plain(batch: Any) -> Any:
    """The same with plain dicts in place of other mappings, which pytrees do not look into."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(_plain, batch)) if type(batch) in (tuple, list) else batch
    return dict(batch) if isinstance(batch, Mapping) else batch


def _of_example(built: BuiltModel, global_batch: int, seed: int) -> Batches:
    """Samples of the example, drawn at random: what a model that returns its loss can be tried with."""
    require_targets(built)
    examples = examples_of(built.args, built.kwargs)

    def make(step: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed + 1 + step)
        chosen = torch.randint(examples.batch, (global_batch,), generator=generator)
        leaves = [
            leaf.detach()[chosen.to(leaf.device)] if batched else leaf
            for leaf, batched in zip(examples.leaves, examples.batched, strict=True)
        ]
        args, kwargs = unflatten(leaves, examples.spec)
        return (*args, kwargs) if kwargs else args, None

    return make


def _as_example(built: BuiltModel, inputs: Any) -> Any:
    """Floating inputs in the dtype of the example."""
    floats = [leaf.dtype for leaf in flatten((built.args, built.kwargs))[0] if isinstance(leaf, Tensor)]
    dtype = next((item for item in floats if item.is_floating_point), None)
    if dtype is None:
        return inputs
    register_dataclasses(inputs)
    leaves, structure = flatten(_plain(inputs))
    changed = [
        leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
    ]
    return unflatten(changed, structure)


def _digits(built: BuiltModel, global_batch: int, seed: int) -> Batches:
    """1797 images of 8 × 8 in ten classes, in a random order that is used up before the next begins."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise BaPipeError("the digits need scikit-learn, which is missing; pip install scikit-learn") from error
    example = built.args[0] if built.args else None
    if not isinstance(example, Tensor) or example[0].numel() != _PIXELS or not example.is_floating_point():
        shape = tuple(example.shape[1:]) if isinstance(example, Tensor) else type(example).__name__
        raise BaPipeError(f"a digit has 8 x 8 pixels, the model takes {shape}; use --data synthetic")
    found = load_digits()
    images = torch.from_numpy(found.data / 16.0).to(example.dtype).reshape(-1, *example.shape[1:])
    classes = torch.from_numpy(found.target).long()

    def make(step: int) -> tuple[Any, Any]:
        wanted = torch.arange(step * global_batch, (step + 1) * global_batch)
        rounds = wanted // len(images)
        chosen = torch.empty_like(wanted)
        for epoch in sorted(set(rounds.tolist())):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch))
            here = rounds == epoch
            chosen[here] = order[wanted[here] % len(images)]
        return built.as_call((images[chosen], classes[chosen]))

    return make

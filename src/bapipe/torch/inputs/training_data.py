"""Mini-batches to train on: what the model's own module makes, or scikit-learn's handwritten digits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError, nearest
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.inputs.build_model import BuiltModel

__all__ = ["DATA", "Batches", "batches_for"]

DATA = ("synthetic", "digits")
_PIXELS = 64


Batches = Callable[[int], tuple[Any, Any]]
"""step -> (inputs, target); always the same, on every rank and however the model is cut"""


def batches_for(built: BuiltModel, data: str, *, minibatch: int, seed: int) -> Batches:
    """Mini-batches for a model; floating inputs have the dtype of its example."""
    if data == "digits":
        return _digits(built, minibatch, seed)
    if data != "synthetic":
        raise BaPipeError(f"unknown data '{data[:40]}'{nearest(data, DATA)}; known: {', '.join(DATA)}")
    make_batch = built.companion("make_batch", "make_batch(seed, size) -> (inputs, target)")
    accepted = inspect.signature(make_batch).parameters
    options = {key: value for key, value in built.options.items() if key in accepted}
    name = built.source.__name__

    def make(step: int) -> tuple[Any, Any]:
        pair = make_batch(seed + 1 + step, minibatch, **options)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise BaPipeError(f"{name}.make_batch must return (inputs, target), got {type(pair).__name__}")
        for leaf in flatten(pair)[0]:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != minibatch:
                got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise BaPipeError(f"{name}.make_batch was asked for {minibatch} samples, got {got}")
        return built.as_call(_as_example(built, pair[0]), pair[1])

    return make


def _as_example(built: BuiltModel, inputs: Any) -> Any:
    """Floating inputs in the dtype of the example."""
    floats = [leaf.dtype for leaf in flatten((built.args, built.kwargs))[0] if isinstance(leaf, Tensor)]
    dtype = next((item for item in floats if item.is_floating_point), None)
    leaves, structure = flatten(inputs)
    if dtype is None:
        return inputs
    return unflatten([leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves], structure)


def _digits(built: BuiltModel, minibatch: int, seed: int) -> Batches:
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
        wanted = torch.arange(step * minibatch, (step + 1) * minibatch)
        rounds = wanted // len(images)
        chosen = torch.empty_like(wanted)
        for epoch in sorted(set(rounds.tolist())):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch))
            here = rounds == epoch
            chosen[here] = order[wanted[here] % len(images)]
        return built.as_call(images[chosen], classes[chosen])

    return make

"""Narrow models of every kind that a pipeline must train exactly, with batches and losses of every form.

Between them they have: one tensor, a tuple, keyword arguments, and both as inputs; integers; batch-norm; tied
weights; values that skip stages; a mean, (sum, count), and a loss that the model returns itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch.stage.loss import LossFunction
from bapipe.torch.zoo import GNMT, VGG16, ResNet50, UNet, gnmt, unet
from bapipe.torch.zoo.common import classes_loss, images, tokens

__all__ = ["SUBJECTS", "Subject", "as_call", "build", "make_batch"]

CLASSES, VOCABULARY, SEQUENCE = 10, 30, 6
PADDING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to train."""

    module: Callable[[float], nn.Module]
    """by its dropout"""
    batch: Callable[[int, int], tuple[Any, Any]]
    """(seed, samples) -> (inputs, targets)"""
    loss: LossFunction | None
    """None: the model returns it"""
    dropout: float = 0.0
    """what it has where the case wants dropout; 0: it has none"""


def _sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of all that is no padding, which every micro-batch has another amount of."""
    total = nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return total, (target != PADDING).sum()


def _gnmt_batch(seed: int, size: int) -> tuple[Any, Any]:
    inputs, target = gnmt.make_batch(seed, size, sequence=3, vocabulary=VOCABULARY)
    target = target.clone()
    target[::2, 1:] = PADDING
    return inputs, target


def _unet_batch(seed: int, size: int) -> tuple[Any, Any]:
    pictures, target = unet.make_batch(seed, size, image=16)
    return (pictures, {"target": target}), None


def _text(seed: int, size: int) -> Tensor:
    return tokens(size, SEQUENCE, VOCABULARY, seed=seed)


def _gpt2(dropout: float) -> nn.Module:
    import transformers as hf

    config = hf.GPT2Config(
        n_embd=16,
        n_layer=3,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    module = hf.GPT2LMHeadModel(config)
    module.loss_function = _next_tokens  # transformers' own computes in float32, whatever the model
    return module


def _next_tokens(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _gpt2_batch(seed: int, size: int) -> tuple[Any, Any]:
    text = _text(seed, size)
    return {"input_ids": text, "labels": text.clone()}, None


def _llama(_: float) -> nn.Module:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def _llama_loss(output: Any, target: Tensor) -> Tensor:
    return classes_loss(output.logits, target)


class _Doubled(torch.autograd.Function):
    """Passes twice the gradient, which no trace of its forward does."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * error


class _Untraceable(nn.Module):
    """Kept whole by a capture; in evaluation mode it is another function."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        return _Doubled.apply(self.dropout(self.norm(self.inner(value))))


class _Whole(nn.Module):
    """Modules that are kept whole between others; one layer is called twice, and one value is an integer.

    Some parameters get no gradient: a frozen one in the layer that is called twice, and those that the loss leaves
    out.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.whole = nn.ModuleList([_Untraceable(dropout), _Untraceable(dropout)])
        self.aside = nn.Linear(8, 1)
        self.shared.bias.requires_grad_(False)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.shared(self.first(value).tanh())
        largest = hidden.argmax(-1)
        hidden = self.shared(self.whole[0](hidden).tanh())
        hidden = self.whole[1](hidden)
        return self.head(hidden) + hidden.gather(1, largest[:, None]), self.aside(hidden)


class _Drifting(nn.Module):
    """Its output depends on a buffer that every forward writes, so micro-batches must come in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, value: Tensor) -> Tensor:
        hidden = self.first(value).tanh()
        self.average = 0.5 * self.average + 0.5 * hidden.detach().mean(0)
        return self.head(self.second(hidden * self.average).tanh())


def _vectors(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


class _DigitsNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 32),
            nn.ReLU(),
            nn.Linear(32, CLASSES),
        )


@functools.cache
def _all_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.images) / 16, torch.from_numpy(found.target)


def _digits(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """The global batch number `seed` of scikit-learn's handwritten digits, shuffled once an epoch."""
    pictures, classes = _all_digits()
    epoch, place = divmod(seed, len(classes) // size)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * size : (place + 1) * size]
    return pictures[chosen], classes[chosen]


SUBJECTS: dict[str, Subject] = {
    "vgg": Subject(
        module=lambda dropout: VGG16(width=4, hidden=16, classes=CLASSES, dropout=dropout, pooled=1),
        batch=lambda seed, size: images(size, 32, CLASSES, seed=seed),
        loss=classes_loss,
        dropout=0.5,
    ),
    "resnet": Subject(
        module=lambda _: ResNet50(width=4, classes=CLASSES, blocks=(1, 1, 1, 1)),
        batch=lambda seed, size: images(size, 32, CLASSES, seed=seed),
        loss=classes_loss,
    ),
    "gnmt": Subject(
        module=lambda dropout: GNMT(layers=4, hidden=8, vocabulary=VOCABULARY, dropout=dropout),
        batch=_gnmt_batch,
        loss=_sum_and_count,
        dropout=0.2,
    ),
    "gpt2": Subject(module=_gpt2, batch=_gpt2_batch, loss=None, dropout=0.1),
    "llama": Subject(
        module=_llama,
        batch=lambda seed, size: ({"input_ids": _text(seed, size)}, _text(seed + 1, size)),
        loss=_llama_loss,
    ),
    "unet": Subject(
        module=lambda _: UNet(levels=2, width=4, classes=4),
        batch=_unet_batch,
        loss=None,
    ),
    "whole": Subject(
        module=_Whole,
        batch=_vectors,
        loss=lambda output, target: classes_loss(output[0], target),
        dropout=0.3,
    ),
    "drifting": Subject(module=lambda _: _Drifting(), batch=_vectors, loss=classes_loss),
    "digits": Subject(module=lambda _: _DigitsNet(), batch=_digits, loss=classes_loss),
}


def build(model: str, numbers: str) -> nn.Module:
    """The model in the dtype, or in float64 with dropout, that `numbers` says; always with the same weights."""
    subject = SUBJECTS[model]
    torch.manual_seed(0)
    module = subject.module(subject.dropout if numbers == "dropout" else 0.0)
    return module.train().to(_dtype(numbers))


def make_batch(model: str, numbers: str, seed: int, size: int) -> tuple[Any, Any]:
    """(inputs, targets), floats in the model's dtype."""
    inputs, targets = SUBJECTS[model].batch(seed, size)
    dtype = _dtype(numbers)

    def converted(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return tree.to(dtype) if tree.is_floating_point() else tree
        if isinstance(tree, dict):
            return {key: converted(item) for key, item in tree.items()}
        return tuple(converted(item) for item in tree)

    return converted(inputs), targets


def _dtype(numbers: str) -> torch.dtype:
    return torch.float32 if numbers == "float32" else torch.float64


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the model itself takes them."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs[-1], dict):
        return inputs[:-1], inputs[-1]
    return inputs, {}

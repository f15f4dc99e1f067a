"""Small models whose layers divide between stages in every way that there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch.stage.loss import LossFunction
from bapipe.torch.zoo.common import classes_loss, images, tokens

__all__ = ["SPLIT_MODELS", "Pictures", "SplitModel", "Words", "build_split_model"]

CLASSES, VOCABULARY, SEQUENCE, PADDING = 5, 30, 6, 0


class Pictures(nn.Module):
    """Convolutions and linear layers with what may follow one: batch-norm, relu, pooling, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 9, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(9, affine=False)
        self.whole = nn.Dropout2d(dropout)
        self.hidden = nn.Linear(9 * 4, 10)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, value: Tensor) -> Tensor:
        value = self.whole(nn.functional.max_pool2d(torch.relu(self.first_norm(self.first(value))), 2))
        value = nn.functional.adaptive_avg_pool2d(self.second_norm(self.second(value)).relu_(), 2)
        value = self.dropout(nn.functional.gelu(self.hidden(value.flatten(1))))
        return self.head(value)


class Words(nn.Module):
    """An embedding, LSTMs both ways and one way, and a vocabulary under a cross-entropy; returns its loss."""

    def __init__(self, dropout: float, *, time_first: bool = False, **loss: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.both_ways = nn.LSTM(8, 5, batch_first=True, bidirectional=True)
        self.between = nn.Linear(10, 9)
        self.one_way = nn.LSTM(9, 7, batch_first=not time_first)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(7, VOCABULARY)
        self.time_first, self.loss = time_first, loss

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        value, _ = self.both_ways(self.dropout(self.embedding(text)))
        value = torch.tanh(self.between(value))
        if self.time_first:
            value = self.one_way(value.transpose(0, 1))[0].transpose(0, 1)
        else:
            value, _ = self.one_way(value)
        logits = self.classifier(value)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **self.loss)


def _words_batch(seed: int, size: int) -> tuple[Any, Any]:
    target = tokens(size, SEQUENCE, VOCABULARY, seed=2 * seed + 1)
    target[::2, 3:] = PADDING
    return (tokens(size, SEQUENCE, VOCABULARY, seed=2 * seed), {"target": target}), None


def _pictures_batch(seed: int, size: int) -> tuple[Any, Any]:
    pictures, target = images(size, 8, CLASSES, seed=seed)
    return pictures.double(), target


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model with its batches."""

    module: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    """(seed, samples) -> (inputs, targets)"""
    loss: LossFunction | None
    """None: the model returns it"""


SPLIT_MODELS: dict[str, SplitModel] = {
    "pictures": SplitModel(module=lambda: Pictures(0.0), batch=_pictures_batch, loss=classes_loss),
    "pictures-dropout": SplitModel(module=lambda: Pictures(0.3), batch=_pictures_batch, loss=classes_loss),
    "words": SplitModel(module=lambda: Words(0.0), batch=_words_batch, loss=None),
    "words-ignored": SplitModel(
        module=lambda: Words(0.0, ignore_index=PADDING, label_smoothing=0.1), batch=_words_batch, loss=None
    ),
    "words-sum": SplitModel(
        module=lambda: Words(0.2, time_first=True, reduction="sum", ignore_index=PADDING),
        batch=_words_batch,
        loss=None,
    ),
}


def build_split_model(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module in float64 and an example of three samples; always with the same weights."""
    torch.manual_seed(0)
    model = SPLIT_MODELS[name]
    inputs, _ = model.batch(0, 3)
    if isinstance(inputs, Tensor):
        return model.module().double(), (inputs,), {}
    return model.module().double(), inputs[:-1], inputs[-1]

"""GNMT-L (Wu et al., 2016) as BaPipe's Table IV has it: L/2 encoder and L/2 decoder LSTM layers.

Separate embeddings of source and target; encoder: a bidirectional LSTM, LSTM(2h → h), (L/2 − 2) × LSTM(h);
decoder: LSTM(h) with Bahdanau attention (2h² + 2h + 1 parameters), then (L/2 − 1) × LSTM(2h → h) fed by the layer
below and the context; a classifier with bias. An LSTM(i → h) has 4h(i + h) + 8h parameters; 445.62 M in all at
L = 32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.zoo.common import Built, classes_loss, finish, require, tokens

__all__ = ["GNMT", "BahdanauAttention", "build_gnmt", "loss", "make_batch"]

loss = classes_loss


class BahdanauAttention(nn.Module):
    """Additive attention with normalised score vector; memory grows with (queries · keys · hidden)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values for its own parameters, also where it was built without memory."""
        nn.init.uniform_(self.score, -0.1, 0.1)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.scale, len(self.score) ** -0.5)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """The context of every query: a mean of the memory weighted by how well each entry fits."""
        pairs = self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias
        direction = self.score / self.score.norm() * self.scale
        weights = torch.softmax(torch.tanh(pairs).matmul(direction), dim=-1)
        return torch.bmm(weights, memory)


class GNMT(nn.Module):
    """Tokens in, (batch, sequence); logits out, (batch, sequence, vocabulary)."""

    def __init__(self, *, layers: int, hidden: int = 1024, vocabulary: int = 32320, dropout: float = 0.2) -> None:
        super().__init__()
        half = layers // 2
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.ModuleList(
            [nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)]
            + [nn.LSTM(2 * hidden if i == 1 else hidden, hidden, batch_first=True) for i in range(1, half)]
        )
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.decoder = nn.ModuleList(
            [nn.LSTM(hidden if i == 0 else 2 * hidden, hidden, batch_first=True) for i in range(half)]
        )
        self.attention = BahdanauAttention(hidden)
        self.classifier = nn.Linear(hidden, vocabulary)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, previous: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits of the next target token, or the loss if a target is given."""
        memory, _ = self.encoder[0](self.source_embedding(source))
        for index, layer in enumerate(self.encoder):
            if index == 0:
                continue
            out, _ = layer(self.dropout(memory))
            memory = out + memory if index > 1 else out
        value, _ = self.decoder[0](self.target_embedding(previous))
        context = self.attention(value, memory)
        for index, layer in enumerate(self.decoder):
            if index == 0:
                continue
            out, _ = layer(torch.cat([self.dropout(value), context], dim=-1))
            value = out + value if index > 1 else out
        logits: Tensor = self.classifier(value)
        return logits if target is None else loss(logits, target)


def build_gnmt(
    *,
    layers: int = 8,
    batch: int = 2,
    sequence: int = 50,
    hidden: int = 1024,
    vocabulary: int = 32320,
    dropout: float = 0.2,
    with_loss: bool = False,
    float64: bool = False,
) -> Built:
    """GNMT with `layers` LSTM layers, even and at least 4."""
    if layers < 4 or layers % 2:
        raise BaPipeError(f"GNMT needs an even number of layers of at least 4, got {layers}; take 4, 8, 16, …")
    require(batch=batch, sequence=sequence, hidden=hidden, vocabulary=vocabulary)
    module = GNMT(layers=layers, hidden=hidden, vocabulary=vocabulary, dropout=dropout)
    (source, previous), target = make_batch(0, batch, sequence=sequence, vocabulary=vocabulary)
    return finish(module, (source, previous), target, with_loss=with_loss, float64=float64)


def make_batch(
    seed: int, size: int, *, sequence: int = 50, vocabulary: int = 32320
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((source, previous target tokens), target tokens)."""
    source = tokens(size, sequence, vocabulary, seed=2 * seed)
    target = tokens(size, sequence, vocabulary, seed=2 * seed + 1)
    return (source, target.roll(1, dims=1)), target

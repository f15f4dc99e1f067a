"""A small GPT with tied embeddings: pre-norm blocks of causal attention (SDPA) and an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.torch.zoo.common import Built, classes_loss, finish, require, tokens

__all__ = ["GPT", "Attention", "Block", "build_gpt", "loss", "make_batch"]

loss = classes_loss


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        batch, sequence, width = value.shape
        query, key, content = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(value).split(width, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, content, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return result


class Block(nn.Module):
    """Attention and MLP, each with its norm and residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.attention(self.norm1(value))
        result: Tensor = value + self.mlp(self.norm2(value))
        return result


class GPT(nn.Module):
    """Tokens in, (batch, sequence); logits out, (batch, sequence, vocabulary)."""

    def __init__(
        self, *, blocks: int, width: int, heads: int, vocabulary: int, sequence: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits, or the loss if a target is given."""
        places = torch.arange(ids.shape[1], device=ids.device)
        value = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            value = block(value)
        logits: Tensor = self.head(self.norm(value))
        return logits if target is None else loss(logits, target)


def build_gpt(
    *,
    blocks: int = 4,
    width: int = 256,
    heads: int = 4,
    vocabulary: int = 8192,
    sequence: int = 128,
    batch: int = 2,
    dropout: float = 0.1,
    tied: bool = True,
    with_loss: bool = False,
    float64: bool = False,
) -> Built:
    """A GPT; `tied` shares the weight of embedding and head."""
    require(blocks=blocks, width=width, heads=heads, vocabulary=vocabulary, sequence=sequence, batch=batch)
    if width % heads:
        raise BaPipeError(f"width must be a multiple of heads, got {width} and {heads}; change one")
    module = GPT(
        blocks=blocks,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        dropout=dropout,
        tied=tied,
    )
    ids, target = make_batch(0, batch, sequence=sequence, vocabulary=vocabulary)
    return finish(module, (ids,), target, with_loss=with_loss, float64=float64)


def make_batch(seed: int, size: int, *, sequence: int = 128, vocabulary: int = 8192) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them."""
    text = tokens(size, sequence + 1, vocabulary, seed=seed)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()

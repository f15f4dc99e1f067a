"""Models that exports are tried with; torch alone."""

import torch
from torch import nn


class Block(nn.Module):
    """Two layers with a residual, so that a plan may cut inside of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.first = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.second = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value + torch.tanh(self.first(self.norm1(value)))
        return value + torch.tanh(self.second(self.norm2(value)))


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head, named as torchtitan names them; missing parts are skipped."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.tok_embeddings(value) if self.tok_embeddings is not None else value
        for block in self.layers:
            value = block(value)
        value = self.norm(value) if self.norm is not None else value
        return self.lm_head(value) if self.lm_head is not None else value


def decoder(blocks: int = 6, width: int = 16, vocabulary: int = 32):
    return Decoder(blocks, width, vocabulary).double()


def make_batch(seed: int, size: int):
    given = torch.randint(32, (size, 5), generator=torch.Generator().manual_seed(seed))
    return (given[:, :4],), given[:, 4]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, -1], target)

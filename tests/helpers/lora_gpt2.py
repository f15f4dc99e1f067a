"""A small GPT-2 of transformers whose own weights are frozen, with low-rank adapters that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LowRank", "build", "build_peft", "loss", "make_batch"]

VOCABULARY, SEQUENCE, WIDTH, BLOCKS = 200, 8, 32, 3


class LowRank(nn.Module):
    """A frozen projection and what a product of two small matrices adds to it."""

    def __init__(self, base: nn.Module, rank: int = 1) -> None:
        super().__init__()
        weight = base.weight
        assert isinstance(weight, Tensor)
        self.base = base
        self.down = nn.Parameter(torch.randn(weight.shape[0], rank) / weight.shape[0] ** 0.5)
        self.up = nn.Parameter(0.02 * torch.randn(rank, weight.shape[1]))

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.base(values) + (values @ self.down) @ self.up
        return added


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def _gpt2() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=WIDTH,
        n_layer=BLOCKS,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config)


def build(*, first: int = 0) -> tuple[nn.Module, tuple[Tensor]]:
    """The blocks from `first` on have adapters; nothing else is trained."""
    model = _gpt2()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.transformer.h[first:]:
        block.attn.c_proj = LowRank(block.attn.c_proj)
    return _Logits(model), (torch.zeros(2, SEQUENCE, dtype=torch.long),)


def build_peft() -> tuple[nn.Module, tuple[Tensor]]:
    """The same with the adapters of the library peft."""
    import peft

    options = {"r": 1, "target_modules": ["attn.c_proj"], "fan_in_fan_out": True, "init_lora_weights": "gaussian"}
    return _Logits(peft.get_peft_model(_gpt2(), peft.LoraConfig(**options))), build()[1]


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

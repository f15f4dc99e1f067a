"""A GPT-2 of two blocks from its config, with random weights, and sentences to train it on; needs transformers.

`examples.tiny_gpt2:build` can be profiled and planned; the loops of examples/train_*.py take the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["TOKENS", "Sentences", "build", "lora", "make_batch", "make_model", "token_loss"]

VOCABULARY, TOKENS = 37, 12


class Sentences(Dataset):  # type: ignore[type-arg]
    """Made-up sentences of which each token follows from the one before."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        first = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
        steps = torch.arange(TOKENS)
        self.tokens = (first[:, None] * (1 + steps) + 3 * steps) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(*, float64: bool = False, seed: int = 0) -> GPT2LMHeadModel:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=TOKENS, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_function = token_loss
    return model.double() if float64 else model


def token_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """The mean over tokens that follow another, in the model's own dtype; transformers' own takes float32."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def lora(model: nn.Module, *, seed: int = 1) -> nn.Module:
    """Adapters of PEFT on its attention; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))  # type: ignore[arg-type,no-any-return]


def build(*, float64: bool = False, adapters: bool = False) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """The module and an example of its inputs, for `bapipe profile` and `Pipeline`."""
    model: nn.Module = make_model(float64=float64)
    return lora(model) if adapters else model, (), make_batch(0, 2)


def make_batch(seed: int, size: int) -> dict[str, Tensor]:
    """Keyword arguments of the model, which returns its loss."""
    sentences = Sentences(size, seed=seed)
    return {"input_ids": sentences.tokens, "labels": sentences.tokens}

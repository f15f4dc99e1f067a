"""TinyLlama's shape: 22 Llama blocks of the transformers library, with random weights; returns its loss."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 22,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
EXAMPLES = 4
"""samples of the example"""


def config(tiny: bool) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**(TINY if tiny else SHAPE), use_cache=False)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Llama(nn.Module):
    """Words and labels in, loss out."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        self.model = transformers.LlamaForCausalLM(config(tiny))

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.model(input_ids=words, use_cache=False).logits, labels)


def made(tiny: bool) -> Llama:
    """The module with random weights: one random block repeated, because drawing a billion numbers takes long."""
    with torch.device("meta"):
        module = Llama(tiny)
    module.to_empty(device="cpu")
    block = 0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    for parameter in module.parameters():
        if parameter.ndim < 2:
            parameter.data.fill_(1.0)
            continue
        flat = parameter.data.view(-1)
        for start in range(0, len(flat), len(block)):
            flat[start : start + len(block)] = block[: len(flat) - start]
    module.model.model.rotary_emb = type(module.model.model.rotary_emb)(config(tiny))
    return module


def build(*, sequence: int = 1024, tiny: bool = False) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and an example of its inputs."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(config(tiny).vocab_size, (EXAMPLES, sequence), generator=generator)
    return made(tiny), (words, words.roll(-1, 1)), {}

"""Models of the transformers library as `bapipe auto` takes them: small configurations, random weights.

Dropout and drop-path are 0 and the router loss is off, so that gradients can be compared with one process.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

__all__ = ["convnextv2", "deberta", "mixtral", "segformer", "t5", "vit"]

Built = tuple[nn.Module, dict[str, Any]]


def _tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _images(batch: int, side: int) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def t5() -> Built:
    config = hf.T5Config(
        vocab_size=4096, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    tokens = _tokens(4, 48, 4096)
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens[:, :32].contiguous()}


def vit() -> Built:
    config = hf.ViTConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024, image_size=64,
        patch_size=8, num_labels=16,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), {"pixel_values": _images(4, 64), "labels": torch.arange(4)}


def deberta() -> Built:
    config = hf.DebertaV2Config(
        vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"], max_position_embeddings=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_dropout=0.0,
    )  # fmt: skip
    tokens = _tokens(4, 64, 4096)
    return hf.DebertaV2ForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def convnextv2() -> Built:
    config = hf.ConvNextV2Config(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 6, 2], drop_path_rate=0.0, image_size=64, num_labels=16
    )
    return hf.ConvNextV2ForImageClassification(config), {
        "pixel_values": _images(4, 64),
        "labels": torch.arange(4),
    }


def segformer() -> Built:
    config = hf.SegformerConfig(
        hidden_sizes=[32, 64, 160, 256], depths=[2, 2, 2, 2], decoder_hidden_size=128, num_labels=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    labels = torch.randint(8, (4, 64, 64), generator=torch.Generator().manual_seed(1))
    return hf.SegformerForSemanticSegmentation(config), {"pixel_values": _images(4, 64), "labels": labels}


def mixtral() -> Built:
    config = hf.MixtralConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=False,
        max_position_embeddings=128,
    )  # fmt: skip
    tokens = _tokens(4, 48, 4096)
    return hf.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}

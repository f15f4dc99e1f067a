"""Tiny models of the transformers library, random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCABULARY = 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "encoder_layerdrop": 0.1,
}
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def ids(batch: int = 2, sequence: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(0))


def language(model: type[nn.Module], config: Any, **inputs: Any) -> Built:
    return model(config), (), {"input_ids": ids(), "labels": ids(), **inputs}


def translation(model: type[nn.Module], config: Any) -> Built:
    return model(config), (), {"input_ids": ids(), "decoder_input_ids": ids(2, 6), "labels": ids(2, 6)}


def vision(model: type[nn.Module], config: Any, side: int) -> Built:
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    return model(config), (), {"pixel_values": images, "labels": torch.tensor([0, 1])}


def whisper() -> Built:
    config = hf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16)
    sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": sound, "decoder_input_ids": ids(2, 6), "labels": ids(2, 6)}
    return hf.WhisperForConditionalGeneration(config), (), inputs


def clip() -> Built:
    part = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text = {
        **part,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
    }
    text |= {"bos_token_id": 1, "pad_token_id": 0}
    image = {**part, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return hf.CLIPModel(config), (), {"input_ids": ids(), "pixel_values": images, "return_loss": True}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: language(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=2
        ),
    ),
    "bert": lambda: language(
        hf.BertForMaskedLM,
        hf.BertConfig(**SIZES, max_position_embeddings=16),
        attention_mask=torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
    ),
    "llama": lambda: language(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: language(hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED, use_cache=False)),
    "qwen3": lambda: language(hf.Qwen3ForCausalLM, hf.Qwen3Config(**HEADS, use_cache=False)),
    "gemma": lambda: language(hf.GemmaForCausalLM, hf.GemmaConfig(**HEADS, use_cache=False)),
    "gemma2": lambda: language(
        hf.Gemma2ForCausalLM, hf.Gemma2Config(**HEADS, use_cache=False, attn_implementation="eager")
    ),
    "gemma3": lambda: language(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**HEADS, use_cache=False)),
    "mistral": lambda: language(hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, use_cache=False)),
    "phi3": lambda: language(hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED, use_cache=False)),
    "gpt-neox": lambda: language(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SIZES, use_cache=False)),
    "modernbert": lambda: language(
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, reference_compile=False),
    ),
    "opt": lambda: language(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            word_embed_proj_dim=32,
            max_position_embeddings=16,
            use_cache=False,
            layerdrop=0.1,
        ),
    ),
    "mixtral": lambda: language(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(
            **GROUPED,
            use_cache=False,
            num_local_experts=4,
            output_router_logits=True,
            experts_implementation="batched_mm",
        ),
    ),
    "qwen3-moe": lambda: language(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **HEADS,
            use_cache=False,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            experts_implementation="batched_mm",
        ),
    ),
    "t5": lambda: translation(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=64,
            use_cache=False,
            decoder_start_token_id=0,
        ),
    ),
    "bart": lambda: translation(
        hf.BartForConditionalGeneration, hf.BartConfig(**SEQ2SEQ, max_position_embeddings=16, use_cache=False)
    ),
    "whisper": whisper,
    "vit": lambda: vision(
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        ),
        16,
    ),
    "swin": lambda: vision(
        hf.SwinForImageClassification,
        hf.SwinConfig(embed_dim=16, depths=[2, 2], num_heads=[2, 4], image_size=32, patch_size=2, window_size=4),
        32,
    ),
    "clip": clip,
    "mamba": lambda: language(
        hf.MambaForCausalLM,
        hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4, use_cache=False),
    ),
}

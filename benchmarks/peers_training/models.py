"""What is trained: models by the words of the command line, their batches, each with a small stand-in."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MODELS", "TrainedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model and how it is trained; the same for every contender."""

    spec: str
    """MODEL of `bapipe profile`"""
    size: int
    """samples of a micro-batch"""
    count: int
    """micro-batches of a global batch"""
    args: dict[str, str] = field(default_factory=dict)
    tiny: dict[str, str] = field(default_factory=dict)
    """arguments that a rehearsal on CPU ranks has besides"""
    tiny_count: int = 8
    """micro-batches of a global batch of 2 each, in a rehearsal"""
    optimizer: str = "adam"

    def given(self, *, tiny: bool) -> dict[str, str]:
        """The arguments of the model's function."""
        return {**self.args, **(self.tiny if tiny else {})}

    def arguments(self, *, tiny: bool) -> list[str]:
        """The `--arg` options."""
        return [word for key, value in self.given(tiny=tiny).items() for word in ("--arg", f"{key}={value}")]

    def batch(self, *, tiny: bool) -> tuple[int, int]:
        """Samples of a micro-batch, and micro-batches of a global batch."""
        return (2, self.tiny_count) if tiny else (self.size, self.count)


_IMAGES = {"image": "32", "width": "8", "classes": "10"}
MODELS = {
    "gnmt-8": TrainedModel(
        spec="gnmt-8",
        args={"with_loss": "true"},
        tiny={"hidden": "32", "vocabulary": "64", "sequence": "6"},
        size=64,
        count=32,
        optimizer="sgd",
    ),
    "vgg16": TrainedModel(
        spec="vgg16",
        args={"with_loss": "true"},
        tiny={**_IMAGES, "hidden": "64"},
        size=32,
        count=32,
        optimizer="sgd",
    ),
    "resnet50": TrainedModel(
        spec="resnet50",
        args={"with_loss": "true"},
        tiny=_IMAGES,
        size=32,
        count=32,
        optimizer="sgd",
    ),
    "resnet50-192": TrainedModel(  # a global batch that is small for a pipeline
        spec="resnet50",
        args={"with_loss": "true"},
        tiny=_IMAGES,
        size=32,
        count=6,
        tiny_count=6,
        optimizer="sgd",
    ),
    "tinyllama": TrainedModel(
        spec="model:build",  # of benchmarks/tinyllama
        args={"sequence": "1024"},
        tiny={"tiny": "true", "sequence": "16"},
        size=4,
        count=16,
    ),
    "tinyllama-256": TrainedModel(
        spec="model:build",
        args={"sequence": "256"},
        tiny={"tiny": "true", "sequence": "16"},
        size=4,
        count=16,
    ),
    "tinyllama-lora": TrainedModel(
        spec="lora_llama:build",
        args={"sequence": "1024"},
        tiny={"tiny": "true", "sequence": "16", "rank": "4"},
        size=4,
        count=16,
    ),
    "gpt2-medium": TrainedModel(
        spec="hf:gpt2",
        args={
            "n_layer": "24",
            "n_embd": "1024",
            "n_head": "16",
            "sequence": "1024",
            "resid_pdrop": "0.0",
            "embd_pdrop": "0.0",
            "attn_pdrop": "0.0",
        },
        tiny={"n_layer": "4", "n_embd": "32", "n_head": "2", "sequence": "16", "vocab_size": "64"},
        size=4,
        count=16,
    ),
    "t5-large": TrainedModel(
        spec="hf:t5",
        args={
            "d_model": "1024",
            "d_ff": "4096",
            "d_kv": "64",
            "num_layers": "24",
            "num_decoder_layers": "24",
            "num_heads": "16",
            "sequence": "256",
            "dropout_rate": "0.0",
        },
        tiny={
            "d_model": "32",
            "d_ff": "64",
            "d_kv": "16",
            "num_layers": "2",
            "num_decoder_layers": "2",
            "num_heads": "2",
            "sequence": "8",
            "vocab_size": "64",
        },
        size=4,
        count=16,
    ),
    "vit-l": TrainedModel(
        spec="hf:vit",
        args={
            "hidden_size": "1024",
            "num_hidden_layers": "24",
            "num_attention_heads": "16",
            "intermediate_size": "4096",
        },
        tiny={
            "hidden_size": "32",
            "num_hidden_layers": "4",
            "num_attention_heads": "2",
            "intermediate_size": "64",
            "image_size": "32",
        },
        size=16,
        count=16,
    ),
    "convnext-l": TrainedModel(
        spec="hf:convnext",
        args={"depths": "3,3,27,3", "hidden_sizes": "192,384,768,1536"},
        tiny={"depths": "1,1,2,1", "hidden_sizes": "8,16,16,32", "image_size": "32"},
        size=16,
        count=16,
    ),
    "diffusion-unet": TrainedModel(
        spec="diffusion_unet:build",
        tiny={"width": "16", "levels": "1,2", "blocks": "1", "attends_from": "1", "image": "8"},
        size=8,
        count=16,
    ),
}
"""the paper's three, and what people train today; of these GNMT-8 and VGG-16 have dropout"""

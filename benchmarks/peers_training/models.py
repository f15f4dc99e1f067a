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
    optimizer: str = "adam"

    def arguments(self, *, tiny: bool) -> list[str]:
        """The `--arg` options."""
        given = {**self.args, **(self.tiny if tiny else {})}
        return [word for key, value in given.items() for word in ("--arg", f"{key}={value}")]


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
        tiny={"image": "32", "width": "8", "hidden": "64", "classes": "10"},
        size=32,
        count=32,
        optimizer="sgd",
    ),
    "resnet50": TrainedModel(
        spec="resnet50",
        args={"with_loss": "true"},
        tiny={"image": "32", "width": "8", "classes": "10"},
        size=32,
        count=32,
        optimizer="sgd",
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
    "gpt2-medium": TrainedModel(
        spec="hf:gpt2",
        args={"n_layer": "24", "n_embd": "1024", "n_head": "16", "sequence": "1024"},
        tiny={"n_layer": "4", "n_embd": "32", "n_head": "2", "sequence": "16", "vocab_size": "64"},
        size=4,
        count=16,
    ),
}

"""What a transformers model is trained for: which class of the library computes that loss, and batches for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError, nearest

__all__ = ["TASKS", "Task", "class_of", "find_task"]

_MASKED = 0.15
"""share of the tokens that a masked language model has to find, as BERT's"""
_SEQUENCE = 128
"""tokens of a sample, unless the model takes fewer or --arg sequence says so"""
_IMAGE = 224
"""pixels of a side, unless the config or --arg image_size says so"""
_NO_LABEL = -100
"""what transformers' losses leave out"""

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One way to train a model."""

    name: str
    mapping: str
    """transformers' table of the classes that train for it, by model type"""
    auto_class: str
    """transformers' class that finds them"""
    make: Callable[[Any, torch.Generator, int, int | None, int | None], Batch]
    """(config, generator, samples, tokens of each, pixels of a side) -> keyword arguments of the model"""


def _tokens(config: Any, generator: torch.Generator, size: int, sequence: int | None) -> Tensor:
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 3:
        raise BaPipeError(f"{config.model_type} has no vocabulary of at least 3 tokens; set --arg vocab_size=1000")
    positions = getattr(text, "max_position_embeddings", None)
    most = positions if isinstance(positions, int) and positions > 0 else sys.maxsize
    if sequence is None:
        # Some models keep the first two positions for padding.
        sequence = _SEQUENCE if most >= _SEQUENCE + 2 else max(most - 2, 1)
    if not 1 <= sequence <= most:
        raise BaPipeError(
            f"{config.model_type} takes 1 to {most} tokens, got sequence={sequence}; change --arg sequence or "
            "--arg max_position_embeddings"
        )
    found = torch.randint(vocabulary, (size, sequence), generator=generator)
    padding = getattr(text, "pad_token_id", None)
    return found if padding is None else torch.where(found == padding, (padding + 1) % vocabulary, found)


def _images(config: Any, generator: torch.Generator, size: int, side: int | None) -> Tensor:
    known = getattr(config, "image_size", None)
    sides = known if side is None else side
    if not isinstance(sides, (list, tuple)):
        sides = (sides or _IMAGE,) * 2
    return torch.randn(size, getattr(config, "num_channels", 3), *sides, generator=generator)


def _causal(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    tokens = _tokens(config, generator, size, sequence)
    return {"input_ids": tokens, "labels": tokens}


def _translated(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    source = _tokens(config, generator, size, sequence)
    return {"input_ids": source, "labels": _tokens(config, generator, size, sequence)}


def _masked(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    tokens = _tokens(config, generator, size, sequence)
    chosen = torch.rand(tokens.shape, generator=generator) < _MASKED
    chosen[:, 0] = True  # a sample without any would have no loss
    return {"input_ids": tokens, "labels": torch.where(chosen, tokens, _NO_LABEL)}


def _classes(config: Any, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(max(1, config.num_labels), shape, generator=generator)


def _text_class(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    tokens = _tokens(config, generator, size, sequence)
    return {"input_ids": tokens, "labels": _classes(config, generator, (size,))}


def _token_class(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    tokens = _tokens(config, generator, size, sequence)
    return {"input_ids": tokens, "labels": _classes(config, generator, tuple(tokens.shape))}


def _image_class(config: Any, generator: torch.Generator, size: int, _: int | None, side: int | None) -> Batch:
    images = _images(config, generator, size, side)
    return {"pixel_values": images, "labels": _classes(config, generator, (size,))}


def _segments(config: Any, generator: torch.Generator, size: int, _: int | None, side: int | None) -> Batch:
    images = _images(config, generator, size, side)
    return {"pixel_values": images, "labels": _classes(config, generator, (size, *images.shape[-2:]))}


def _spoken(config: Any, generator: torch.Generator, size: int, sequence: int | None, _: int | None) -> Batch:
    bands, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if not isinstance(bands, int) or not isinstance(positions, int):
        raise BaPipeError(
            f"{config.model_type} takes other sound than mel spectra of a fixed length; write a function that "
            "returns the model and an example of its inputs, and give package.module:function"
        )
    longest = getattr(config, "max_target_positions", None) or sys.maxsize
    labels = _tokens(config, generator, size, min(_SEQUENCE, longest) if sequence is None else sequence)
    return {"input_features": torch.randn(size, bands, 2 * positions, generator=generator), "labels": labels}


def _task(name: str, mapping: str, auto_class: str, make: Callable[..., Batch]) -> Task:
    return Task(
        name=name, mapping=f"MODEL_FOR_{mapping}_MAPPING_NAMES", auto_class=f"AutoModelFor{auto_class}", make=make
    )


TASKS = (
    _task("seq2seq-lm", "SEQ_TO_SEQ_CAUSAL_LM", "Seq2SeqLM", _translated),
    _task("masked-lm", "MASKED_LM", "MaskedLM", _masked),
    _task("speech-seq2seq", "SPEECH_SEQ_2_SEQ", "SpeechSeq2Seq", _spoken),
    _task("causal-lm", "CAUSAL_LM", "CausalLM", _causal),
    _task("image-classification", "IMAGE_CLASSIFICATION", "ImageClassification", _image_class),
    _task("semantic-segmentation", "SEMANTIC_SEGMENTATION", "SemanticSegmentation", _segments),
    _task("sequence-classification", "SEQUENCE_CLASSIFICATION", "SequenceClassification", _text_class),
    _task("token-classification", "TOKEN_CLASSIFICATION", "TokenClassification", _token_class),
)
"""in the order in which a model type takes the first that it has: BERT is for masked language modelling first"""


def _classes_of(task: Task, kind: str) -> tuple[str, ...]:
    """Names of the classes that train a model type for a task; none where it is not trained for it."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, task.mapping).get(kind, ())
    return (found,) if isinstance(found, str) else tuple(found)


def class_of(task: Task, config: Any) -> str:
    """The name of the class that trains a model for a task: of several, the first."""
    return _classes_of(task, config.model_type)[0]


def find_task(config: Any, name: str | None) -> Task:
    """The task of that name, or what the config's own class was made for, or the first that its type has."""
    kind = config.model_type
    usable = [task for task in TASKS if _classes_of(task, kind)]
    if name is not None:
        found = next((task for task in usable if task.name == name), None)
        if found is None:
            known = ", ".join(task.name for task in usable) or "none"
            raise BaPipeError(
                f"{kind} is not trained for task '{name[:40]}'"
                f"{nearest(name, [task.name for task in usable])}; tasks of it: {known}"
            )
        return found
    classes = getattr(config, "architectures", None) or ()
    made_for = [task for task in usable if any(name in classes for name in _classes_of(task, kind))]
    if not usable:
        raise BaPipeError(
            f"hf:{kind} is trained for none of {', '.join(task.name for task in TASKS)}; write a function that "
            "returns the model and an example of its inputs, and give package.module:function"
        )
    return (made_for or usable)[0]

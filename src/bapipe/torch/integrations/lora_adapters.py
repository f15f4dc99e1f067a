"""LoRA adapters of PEFT on a model: `--lora r=8,alpha=16,targets=q_proj+v_proj`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import nn

from bapipe.errors import BaPipeError, first_line, nearest
from bapipe.models.model_spec import parse_arguments
from bapipe.torch.capturing.seeded_rng import seeded_by_place
from bapipe.torch.capturing.torch_internals import swap_parameter

__all__ = ["add_lora", "name_without_lora"]

_OPTIONS = ("r", "alpha", "dropout", "targets")
_WRAPPER = "base_model.model."
_WRAPPED = re.compile(r"\.base_layer(?=\.)")


def add_lora(module: nn.Module, text: str) -> nn.Module:
    """The module with adapters, all of its own parameters frozen.

    The adapters have memory also where the module has none. Their values follow torch's initial seed and their
    place in the model alone, whatever was drawn before.
    """
    options: dict[str, Any] = dict(parse_arguments([part.strip() for part in text.split(",")]))
    unknown = next((key for key in options if key not in _OPTIONS), None)
    if unknown is not None or "r" not in options:
        what = "r is missing" if unknown is None else f"'{unknown[:40]}' is unknown{nearest(unknown, _OPTIONS)}"
        raise BaPipeError(f"--lora looks like r=8,alpha=16,dropout=0,targets=q_proj+v_proj: {what}")
    rank = options["r"]
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise BaPipeError(f"--lora needs a rank of at least 1, got r={rank}; give for example r=8")
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise BaPipeError("--lora needs peft, which is missing; pip install peft") from error
    targets = options.get("targets")
    config: Any = LoraConfig(
        r=rank,
        lora_alpha=options.get("alpha", 2 * rank),
        lora_dropout=options.get("dropout", 0.0),
        target_modules=None if targets is None else str(targets).split("+"),
    )
    try:
        with warnings.catch_warnings():
            # PEFT sets it right by itself for layers whose weights are transposed, such as GPT-2's.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            found: nn.Module = get_peft_model(module, config)  # type: ignore[arg-type, unused-ignore]
    except ValueError as error:
        raise BaPipeError(
            f"peft cannot put LoRA on {type(module).__name__}: {first_line(error)}; name linear layers, such as "
            "--lora r=8,targets=q_proj+v_proj"
        ) from error
    _initialise(found)
    return found


def _initialise(module: nn.Module) -> None:
    seed = torch.initial_seed()
    for path, layer in module.named_modules():
        reset = getattr(layer, "reset_lora_parameters", None)
        if not callable(reset):
            continue
        for name, parameter in layer.named_parameters():
            if name.startswith("lora_") and parameter.is_meta:
                owner, _, last = name.rpartition(".")
                empty = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                swap_parameter(layer.get_submodule(owner), last, empty)
        with seeded_by_place(seed, path):
            for adapter in module.active_adapters:  # type: ignore[union-attr]
                reset(adapter, True)


def name_without_lora(name: str) -> str:
    """What a parameter of the model was called before PEFT wrapped it."""
    return _WRAPPED.sub("", name.removeprefix(_WRAPPER))

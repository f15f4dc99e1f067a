"""Attention masks of transformers models, captured as they are in eager mode.

While it is traced, transformers makes a mask tensor where in eager mode it would make none and let the attention
be causal by itself. With a mask tensor attention takes a slower kernel (a stage of Llama blocks in bf16 is 12.7 %
slower on a quarter of an H200), and the mask crosses every cut. It does so because it may not look at the values
of `attention_mask` and `position_ids`. Where the caller gives neither there is nothing to look at, so the eager
answer holds for every batch.

Uses private parts of transformers, each only where it is there.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["masks_as_in_eager"]

_VALUES = ("attention_mask", "position_ids", "decoder_attention_mask", "decoder_position_ids", "past_key_values")
"""arguments that a mask depends on"""


class _Calls:
    """Whether the model that is being called was given nothing that a mask depends on."""

    def __init__(self) -> None:
        self.plain = False

    def hook(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except TypeError:
            self.plain = False
            return
        nested = given.get("kwargs")
        named = {**given, **(nested if isinstance(nested, dict) else {})}
        self.plain = all(named.get(name) is None for name in _VALUES)


@contextlib.contextmanager
def masks_as_in_eager(module: nn.Module) -> Iterator[None]:
    """Within, transformers models that are called without masks and positions make none of their own."""
    masking = sys.modules.get("transformers.masking_utils")
    models = _outermost(module)
    if masking is None or not models:
        yield
        return
    calls = _Calls()
    handles = [model.register_forward_pre_hook(calls.hook, with_kwargs=True) for model in models]
    before = {name: getattr(masking, name) for name in _STAND_INS if hasattr(masking, name)}
    for name, own in before.items():
        setattr(masking, name, _STAND_INS[name](own, calls))
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(masking, name, own)
        for handle in handles:
            handle.remove()


def _outermost(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in a module that are in no other."""
    library = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None:
        return []
    found: dict[str, nn.Module] = {}
    for name, item in module.named_modules():
        if isinstance(item, kind) and not any(name.startswith(f"{path}.") or not path for path in found):
            found[name] = item
    return list(found.values())


def _no_packing(own: Callable[..., Any], calls: _Calls) -> Callable[..., Any]:
    """Positions that the model counts itself belong to one sequence per sample."""
    return lambda *args, **kwargs: None if calls.plain else own(*args, **kwargs)


def _not_exporting(own: Callable[[], bool], calls: _Calls) -> Callable[[], bool]:
    return lambda: False if calls.plain else own()


def _tracing_of_a_tensor(own: Callable[..., bool], calls: _Calls) -> Callable[..., bool]:
    """Asked of no tensor it is about masks that there are none of."""
    return lambda tensor=None: False if calls.plain and tensor is None else own(tensor)


_STAND_INS: dict[str, Callable[[Any, _Calls], Callable[..., Any]]] = {
    "find_packed_sequence_indices": _no_packing,
    "is_torchdynamo_exporting": _not_exporting,
    "is_tracing": _tracing_of_a_tensor,
}

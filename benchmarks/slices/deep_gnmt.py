"""GNMT-L for any L: its profile from that of GNMT-8, and the model itself, built and traced within seconds.

Further layers cost what the last of their kind do. The model is built without memory, so that a rank allocates its
own stages only: eight whole GNMT-158 are 57 GB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bapipe.costs.fields import COST_FIELDS, CostTable, as_tuples
from bapipe.costs.profile import Profile
from bapipe.torch.zoo.common import Built, classes_loss, finish
from bapipe.torch.zoo.gnmt import GNMT, make_batch

__all__ = ["build_deep_gnmt", "deep_profile", "loss", "make_batch"]

loss = classes_loss


def deep_profile(profile: Profile, layers: int) -> Profile:
    """The profile of GNMT with `layers` LSTM layers, even and at least 8."""
    half = layers // 2
    known = [layer.name for layer in profile.layers]
    order = [known.index(name) for name in _names(half, last=3)]
    wanted = _names(half, last=half)
    made = tuple(replace(profile.layers[index], name=name) for index, name in zip(order, wanted, strict=True))
    model = replace(
        profile.model,
        name=f"gnmt-{layers}",
        ref=f"{__name__}:{build_deep_gnmt.__name__}",
        args={**profile.model.args, "layers": layers},
        fingerprint=None,
    )
    tables = {name: _reordered(table, order) for name, table in profile.accelerators.items()}
    return replace(profile, model=model, layers=made, accelerators=tables)


def _names(half: int, *, last: int) -> list[str]:
    """Layers in order, those after the `last` of encoder and decoder called like it."""
    encoder = [f"encoder.{min(index, last)}" for index in range(half)]
    decoder = [f"decoder.{min(index, last)}" for index in range(1, half)]
    return ["source_embedding", *encoder, "target_embedding", "decoder.0", "attention", *decoder, "classifier"]


def _reordered(table: CostTable, order: list[int]) -> CostTable:
    """All that has a column per layer, with the columns in this order."""
    changed: dict[str, Any] = {
        name: as_tuples(np.array(getattr(table, name))[..., order])
        for name, rule in COST_FIELDS.items()
        if rule.per != "size" and getattr(table, name) is not None
    }
    return replace(table, **changed)


def build_deep_gnmt(
    *,
    layers: int,
    batch: int = 2,
    sequence: int = 50,
    hidden: int = 1024,
    vocabulary: int = 32320,
    dropout: float = 0.2,
    with_loss: bool = False,
) -> Built:
    """GNMT on the meta device, with an example of its inputs."""
    with torch.device("meta"):
        module = GNMT(layers=layers, hidden=hidden, vocabulary=vocabulary, dropout=dropout)
    inputs, target = make_batch(0, batch, sequence=sequence, vocabulary=vocabulary)
    return finish(module, inputs, target, with_loss=with_loss, float64=False)

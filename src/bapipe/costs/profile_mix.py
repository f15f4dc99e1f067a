"""Profiles of one model with inputs of several lengths as one: what a global batch costs on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bapipe.costs.fields import COST_FIELDS, CostTable
from bapipe.costs.profile import Profile
from bapipe.costs.profile_merge import require_same_model
from bapipe.costs.profile_ways import has_both_ways, join_ways, of_way
from bapipe.errors import BaPipeError

__all__ = ["mixed_profile"]

_CROSSING = ("boundary_forward", "boundary_backward")
"""bytes that cost time, and are averaged with it"""


def mixed_profile(profiles: Sequence[Profile], shares: Sequence[float]) -> Profile:
    """The costs of a mix: of every so many global batches, `shares` are of each profile's size.

    Seconds, and bytes that cross a cut, are means, so that a plan of it is made, and its time predicted, for a
    batch of mean cost; memory is the most that any of them needs. The model is that of the profile with most
    activations, which every other size fits in. Layers as captured and compiled are mixed each by themselves,
    where all profiles have both.
    """
    captured = _mixed_one_way([of_way(item, compiled=False) for item in profiles], shares)
    if not all(map(has_both_ways, profiles)):
        return captured
    return join_ways(captured, _mixed_one_way([of_way(item, compiled=True) for item in profiles], shares))


def _mixed_one_way(profiles: Sequence[Profile], shares: Sequence[float]) -> Profile:
    if len(profiles) != len(shares) or not profiles or min(shares) < 0 or not sum(shares) > 0:
        raise BaPipeError(
            f"a mix has a share of at least 0 for each of its {len(profiles)} profiles, got "
            f"{', '.join(f'{share:g}' for share in shares) or 'none'}; give as many"
        )
    first = profiles[0]
    for other in profiles[1:]:
        require_same_model(first, other)
        if other.accelerators.keys() != first.accelerators.keys():
            raise BaPipeError(
                f"the profiles of a mix have costs for {', '.join(first.accelerators)[:100]} and for "
                f"{', '.join(other.accelerators)[:100]}; profile every size on the same"
            )
    weights = [share / sum(shares) for share in shares]
    largest = max(profiles, key=_activations)
    tables = {
        name: _mixed(name, [item.accelerators[name] for item in profiles], weights) for name in first.accelerators
    }
    return replace(largest, accelerators=tables, input_bytes=max(item.input_bytes for item in profiles))


def _activations(profile: Profile) -> float:
    return max(float(np.sum(table.saved_activations[-1])) for table in profile.accelerators.values())


def _mixed(name: str, tables: Sequence[CostTable], weights: Sequence[float]) -> CostTable:
    first = tables[0]
    for table in tables[1:]:
        if table.microbatches != first.microbatches or table.source != first.source:
            raise BaPipeError(
                f"the profiles of a mix have micro-batches {list(first.microbatches)} and "
                f"{list(table.microbatches)} on '{name[:60]}', {first.source} and {table.source}; profile all "
                "alike"
            )
    parts = " + ".join(
        f"{weight:.3g} of {table.description}" for weight, table in zip(weights, tables, strict=True)
    )
    fields: dict[str, Any] = {}
    for key, rule in COST_FIELDS.items():
        given = [getattr(table, key) for table in tables]
        if any(item is None for item in given):
            fields[key] = None
            continue
        values = np.array(given, dtype=np.float64)
        averaged = rule.unit == "seconds" or key in _CROSSING
        found = np.tensordot(np.array(weights), values, axes=1) if averaged else values.max(axis=0)
        fields[key] = tuple(map(tuple, found.tolist())) if found.ndim == 2 else tuple(found.tolist())
    return replace(
        first,
        description=f"a mix: {parts}"[:400],
        spread=max((table.spread for table in tables if table.spread is not None), default=None),
        not_fitting=tuple(sorted({size for table in tables for size in table.not_fitting})),
        **fields,
    )

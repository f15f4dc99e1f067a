"""Profiles of one model from several machines, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bapipe.costs.fields import COST_FIELDS, CostField, CostTable, Like
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import has_both_ways, join_ways, of_way
from bapipe.errors import BaPipeError

__all__ = ["merge_profiles", "require_same_model"]


def merge_profiles(profiles: Sequence[Profile], *, replace_older: bool = False) -> Profile:
    """One profile with the accelerator types of all; a plan may then mix them.

    All must be of the same model (fingerprint, where both have one; layer names, parameters and weights) and
    precision. Sizes of the same type measured apart are joined if they do not overlap; where they do,
    `replace_older` lets the later profile's figures win, else that is refused. Costs as captured and compiled are
    merged each by themselves, where profiles have both.
    """
    if not profiles:
        raise BaPipeError("there is nothing to merge; give at least one profile")
    merged = _merged_one_way([of_way(item, compiled=False) for item in profiles], replace_older=replace_older)
    compiled = [of_way(item, compiled=True) for item in profiles if has_both_ways(item)]
    if not compiled:
        return merged
    return join_ways(merged, _merged_one_way(compiled, replace_older=replace_older))


def _merged_one_way(profiles: Sequence[Profile], *, replace_older: bool) -> Profile:
    first = profiles[0]
    accelerators = dict(first.accelerators)
    for other in profiles[1:]:
        require_same_model(first, other)
        for name, table in other.accelerators.items():
            known = accelerators.get(name)
            accelerators[name] = (
                table if known is None else _joined(name, known, table, replace_older=replace_older)
            )
    fingerprint = next((item.model.fingerprint for item in profiles if item.model.fingerprint), None)
    return replace(first, accelerators=accelerators, model=replace(first.model, fingerprint=fingerprint))


def require_same_model(first: Profile, other: Profile) -> None:
    """Refuse profiles of different models, precisions or kinds of layers."""
    names = f"{first.model.name} and {other.model.name}"
    one, two = first.model.fingerprint, other.model.fingerprint
    if one is not None and two is not None and one != two:
        raise BaPipeError(f"{names} differ in fingerprint ({one}, {two}): not one model; profile the same code")
    if first.dtype != other.dtype:
        raise BaPipeError(f"{names} are of {first.dtype} and {other.dtype}; merge profiles of one precision")
    if first.compiled != other.compiled:
        raise BaPipeError(f"one of {names} was measured compiled, the other was not; profile both alike")
    if len(first.layers) != len(other.layers):
        raise BaPipeError(f"{names} have {len(first.layers)} and {len(other.layers)} layers; merge one model")
    for here, there in zip(first.layers, other.layers, strict=True):
        if (here.name, here.parameters, here.weight_bytes) != (there.name, there.parameters, there.weight_bytes):
            raise BaPipeError(
                f"{names} differ at layer '{here.name[:60]}' ({here.parameters} parameters) and "
                f"'{there.name[:60]}' ({there.parameters}); merge one model"
            )


def _joined(name: str, known: CostTable, later: CostTable, *, replace_older: bool) -> CostTable:
    both = sorted(set(known.microbatches) & set(later.microbatches))
    if both and not replace_older:
        raise BaPipeError(
            f"two profiles have costs for '{name[:60]}' at micro-batch {both[0]}; file one under another --type, "
            "or merge with --replace"
        )
    if known.source != later.source:
        raise BaPipeError(f"the costs for '{name[:60]}' are {known.source} and {later.source}; keep one kind")
    taken = [(size, 0, row) for row, size in enumerate(known.microbatches) if size not in both]
    taken += [(size, 1, row) for row, size in enumerate(later.microbatches)]
    taken.sort()
    sizes = tuple(size for size, _, _ in taken)
    merged = {name: _merged(name, rule, (known, later), taken) for name, rule in COST_FIELDS.items()}
    same = known.description == later.description
    return replace(
        later,
        description=later.description if same else f"{known.description} | {later.description}",
        microbatches=sizes,
        **_optimizer_of(known, later),
        spread=max((item.spread for item in (known, later) if item.spread is not None), default=None),
        not_fitting=tuple(sorted({*known.not_fitting, *later.not_fitting} - set(sizes))),
        **merged,
    )


def _optimizer_of(known: CostTable, later: CostTable) -> dict[str, Any]:
    """What is known of the optimizer: the later's, if both were measured with the same."""
    names = ("optimizer", "optimizer_state", "optimizer_workspace")
    same = known.optimizer == later.optimizer
    return {name: getattr(later, name) if same else None for name in names}


def _merged(
    name: str, rule: CostField, tables: tuple[CostTable, CostTable], taken: Sequence[tuple[int, int, int]]
) -> Any:
    """One field by its rule; `taken` has each size, which table it is from and where it stands there."""
    given = [getattr(table, name) for table in tables]
    if rule.merging == "later":
        return given[0] if given[1] is None else given[1]
    if rule.merging == "nearest":
        found = {size: given[table][row] for size, table, row in taken if given[table] is not None}
        near = {size: min(found, key=lambda other: (abs(other - size), other)) for size, _, _ in taken if found}
        return tuple(tuple(value * size / near[size] for value in found[near[size]]) for size in near) or None
    if rule.merging == "stand-in" and isinstance(rule.unknown, Like) and given != [None, None]:
        instead = [getattr(table, rule.unknown.field) for table in tables]
        given = instead if None in instead else [own or other for own, other in zip(given, instead, strict=True)]
    return None if None in given else tuple(given[table][row] for _, table, row in taken)

"""Profiles of one model from several machines, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bapipe.costs.profile import CostTable, Profile
from bapipe.errors import BaPipeError

__all__ = ["merge_profiles"]

Rows = tuple[tuple[float, ...], ...]


def merge_profiles(profiles: Sequence[Profile], *, replace_older: bool = False) -> Profile:
    """One profile with the accelerator types of all; a plan may then mix them.

    All must be of the same model (fingerprint, where both have one; layer names, parameters and weights) and
    dtype. Sizes of the same type measured apart are joined if they do not overlap; where they do, `replace_older`
    lets the later profile's figures win, else that is refused.
    """
    if not profiles:
        raise BaPipeError("there is nothing to merge; give at least one profile")
    first = profiles[0]
    accelerators = dict(first.accelerators)
    for other in profiles[1:]:
        _require_same_model(first, other)
        for name, table in other.accelerators.items():
            known = accelerators.get(name)
            accelerators[name] = (
                table if known is None else _joined(name, known, table, replace_older=replace_older)
            )
    fingerprint = next((item.model.fingerprint for item in profiles if item.model.fingerprint), None)
    return replace(first, accelerators=accelerators, model=replace(first.model, fingerprint=fingerprint))


def _require_same_model(first: Profile, other: Profile) -> None:
    names = f"{first.model.name} and {other.model.name}"
    one, two = first.model.fingerprint, other.model.fingerprint
    if one is not None and two is not None and one != two:
        raise BaPipeError(f"{names} differ in fingerprint ({one}, {two}): not one model; profile the same code")
    if first.dtype != other.dtype:
        raise BaPipeError(f"{names} are of {first.dtype} and {other.dtype}; merge profiles of one dtype")
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
    taken = [(size, known, row) for row, size in enumerate(known.microbatches) if size not in both]
    taken += [(size, later, row) for row, size in enumerate(later.microbatches)]
    taken.sort(key=lambda item: item[0])
    sizes = tuple(size for size, _, _ in taken)

    def rows(field: str) -> Rows:
        return tuple(getattr(table, field)[row] for _, table, row in taken)

    apart = known.weight_gradient is not None and later.weight_gradient is not None
    weighed = known.workspace is not None and later.workspace is not None
    each = known.layer_workspace is not None and later.layer_workspace is not None
    phases = known.backward_workspace is not None and later.backward_workspace is not None

    def told_or(field: str, instead: str) -> Rows | None:
        """Where one table does not tell a figure, what a profile takes for it."""
        if getattr(known, field) is None and getattr(later, field) is None:
            return None
        return tuple((getattr(table, field) or getattr(table, instead))[row] for _, table, row in taken)

    def divided(field: str) -> Rows | None:
        """Where a table does not know what dividing costs, or what passes a layer by, in proportion to the nearest
        size that does."""
        found = {size: getattr(table, field)[row] for size, table, row in taken if getattr(table, field)}
        if not found:
            return None
        nearest = {size: min(found, key=lambda other: (abs(other - size), other)) for size in sizes}
        return tuple(tuple(value * size / nearest[size] for value in found[nearest[size]]) for size in sizes)

    same = known.description == later.description
    return replace(
        later,
        description=later.description if same else f"{known.description} | {later.description}",
        microbatches=sizes,
        forward=rows("forward"),
        backward=rows("backward"),
        weight_gradient=rows("weight_gradient") if apart else None,
        boundary_forward=rows("boundary_forward"),
        boundary_backward=rows("boundary_backward"),
        stash=rows("stash"),
        workspace=tuple(_workspace(table)[row] for _, table, row in taken) if weighed else None,
        layer_workspace=rows("layer_workspace") if each else None,
        forward_workspace=told_or("forward_workspace", "layer_workspace") if each else None,
        backward_workspace=told_or("backward_workspace", "layer_workspace") if each else None,
        weight_workspace=told_or("weight_workspace", "backward_workspace") if phases else None,
        library=later.library or known.library,
        parting=divided("parting"),
        part_forward=divided("part_forward"),
        part_backward=divided("part_backward"),
        part_stash=divided("part_stash"),
        delayed=told_or("delayed", "stash"),
        passing_forward=divided("passing_forward"),
        passing_backward=divided("passing_backward"),
        saved_before=divided("saved_before"),
        kept_input=divided("kept_input"),
        optimizer=later.optimizer if later.optimizer == known.optimizer else None,
        not_fitting=tuple(sorted({*known.not_fitting, *later.not_fitting} - set(sizes))),
    )


def _workspace(table: CostTable) -> tuple[float, ...]:
    assert table.workspace is not None
    return table.workspace

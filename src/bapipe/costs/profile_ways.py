"""A model's layers as they were captured and as they were compiled: one profile with the costs of both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError

__all__ = ["Compiling", "each_way", "has_both_ways", "join_ways", "of_way", "way_words"]

Compiling: TypeAlias = bool | Literal["auto"]
"""whether layers are compiled; auto: both ways are measured, and the faster one is planned"""


def has_both_ways(profile: Profile) -> bool:
    """Whether the layers were measured as captured and compiled, on one type of accelerators at least."""
    return profile.compiled_accelerators is not None


def of_way(profile: Profile, *, compiled: bool) -> Profile:
    """The costs of one way alone; the profile itself, where it has only one, whichever that is."""
    if profile.compiled_accelerators is None:
        return profile
    if not compiled:
        return replace(profile, compiled_accelerators=None)
    return replace(profile, accelerators=profile.compiled_accelerators, compiled_accelerators=None, compiled=True)


def join_ways(captured: Profile, compiled: Profile) -> Profile:
    """One profile with both ways, of two of the same model that have one each."""
    if has_both_ways(captured) or has_both_ways(compiled) or captured.compiled or not compiled.compiled:
        raise BaPipeError(
            f"a profile with both ways is made of one of {captured.model.name} as captured and one compiled; "
            "profile it with --compile auto"
        )
    if (captured.layers, captured.dtype) != (compiled.layers, compiled.dtype):
        raise BaPipeError(
            f"the profiles of {captured.model.name} as captured and compiled have different layers; profile it "
            "with --compile auto"
        )
    return replace(captured, compiled_accelerators=dict(compiled.accelerators))


def each_way(profile: Profile, change: Callable[[Profile], Profile]) -> Profile:
    """The profile with each of its ways changed by itself."""
    if not has_both_ways(profile):
        return change(profile)
    return join_ways(*(change(of_way(profile, compiled=compiled)) for compiled in (False, True)))


def way_words(*, compiled: bool) -> str:
    """The way in words: how stages run."""
    return "compiled" if compiled else "as captured"

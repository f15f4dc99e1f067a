"""Every assumption of the FPGA model by name, with its default and where that comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bapipe.errors import BaPipeError, nearest

__all__ = ["SOURCES", "Parameters", "parse_assumptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What the model assumes beyond the boards' own figures; `SOURCES` says on what basis."""

    allocation: Literal["integer", "fluid"] = "integer"
    """integer: each module has whole tiles Tn · Tm · Tk of DSPs; fluid: the ideal share of the board"""
    slices: int = 16
    """steps in which a layer may be shared between two boards; 1 keeps layers whole"""
    weight_reads: float = 2.0
    """times an image reads a weight that lies in DDR"""
    gradient_passes: float = 2.0
    """times an image passes over a gradient accumulator that lies in DDR"""
    feature_passes: float = 2.0
    """times an image passes over an activation that lies in DDR"""
    reuse: int = 1
    """images that share one pass over weights and gradients in DDR"""
    ddr_efficiency: float = 1.0
    """share of the board's DDR bandwidth that streams reach"""
    refill: float = 1.0
    """share of the layer pipeline's fill that 1f1b-as pays at each change between forward and backward"""
    parking: bool = False
    """whether weights that do not fit may lie in a neighbour's on-chip RAM instead of DDR"""
    dp_reuse: int = 2
    """images that share one pass over weights and gradients in the data-parallel variant batched-reuse"""

    def __post_init__(self) -> None:
        if self.allocation not in ("integer", "fluid"):
            raise BaPipeError(f"allocation must be integer or fluid, got '{str(self.allocation)[:40]}'")
        for name, low, high in (
            ("slices", 1, 64), ("weight_reads", 0, 1e3), ("gradient_passes", 0, 1e3), ("feature_passes", 0, 1e3),
            ("reuse", 1, 1e6), ("refill", 0, 1e3), ("dp_reuse", 1, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise BaPipeError(f"{name} must be from {low:g} to {high:g}, got {value:g}; correct it")
        if not 0 < self.ddr_efficiency <= 1:
            raise BaPipeError(f"ddr_efficiency must be more than 0 and at most 1, got {self.ddr_efficiency:g}")


SOURCES: dict[str, str] = {
    "allocation": "FPDeep: resident FP, EB and WG modules, each with DSPs of its own",
    "slices": "assumption: fine enough to balance, coarse enough to search; FPDeep cuts within layers",
    "weight_reads": "FP and EB each read every weight once per image",
    "gradient_passes": "WG reads and writes the accumulator of every weight once per image",
    "feature_passes": "FP writes what WG later reads",
    "reuse": "the paper streams image by image (micro-batch 1): nothing is shared",
    "ddr_efficiency": "Table V's ~40 GB/s taken as what streams reach",
    "refill": "model: before a layer starts it needs as many rows as its kernel is high",
    "parking": "FPDeep prefers a neighbour's RAM to DDR; the BaPipe paper does not speak of it",
    "dp_reuse": "assumption: the least that shares anything",
}
"""parameter -> basis of its default"""


def parse_assumptions(texts: Iterable[str], base: Parameters | None = None) -> Parameters:
    """`name=value` texts, such as "allocation=fluid", on top of `base`."""
    given: dict[str, object] = {}
    kinds = {field.name: field for field in dataclasses.fields(Parameters)}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or name not in kinds:
            raise BaPipeError(
                f"--assume takes name=value, got '{text[:60]}'{nearest(name, kinds)}; names: {', '.join(kinds)}"
            )
        given[name] = _value(name, value, kinds[name].default)
    return dataclasses.replace(base or Parameters(), **given)  # type: ignore[arg-type]


def _value(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "yes", "no"):
            raise BaPipeError(f"--assume {name} must be true or false, got '{text[:40]}'")
        return text.lower() in ("true", "yes")
    if isinstance(default, str):
        return text
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise BaPipeError(f"--assume {name} must be {what}, got '{text[:40]}'") from None

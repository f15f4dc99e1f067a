"""A table of the paper beside ours: cells, what of them must hold, and the constants behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Claim", "Constant", "Figure", "Table", "table_values"]

Figure = float | str | None
"""a number, a word such as the name of a schedule, or nothing"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of the paper and ours."""

    row: str
    column: str
    paper: Figure
    """None where the paper has no such figure"""
    ours: Figure
    """None where there is nothing to set against it"""
    calibrated: bool = False
    """whether a constant was fitted to this figure, or it is 1 by definition"""
    limit: float | None = None
    """how far `error` may be from 0; None: nothing is promised"""
    absolute: bool = False
    """whether the limit is of ours − paper instead of the relative error"""

    @property
    def error(self) -> float | None:
        """ours / paper − 1; for words 0 where they are the same and 1 where not."""
        if self.paper is None or self.ours is None:
            return None
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return 0.0 if self.paper == self.ours else 1.0
        if self.paper == 0:
            return 0.0 if self.ours == 0 else math.copysign(1.0, self.ours)
        return round(self.ours / self.paper - 1, 9) + 0.0

    @property
    def holds(self) -> bool:
        """Whether the figure is as near as it must be."""
        if self.limit is None:
            return True
        error = self.error
        if self.absolute and isinstance(self.paper, float) and isinstance(self.ours, float):
            error = self.ours - self.paper
        return error is not None and abs(error) <= self.limit + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A figure that the computation rests on."""

    name: str
    value: str
    source: str
    calibrated: bool = False
    """whether it was fitted to a figure of the table"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What must hold of several cells together."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the paper, reproduced."""

    name: str
    """table1 to table6"""
    title: str
    cells: tuple[Cell, ...]
    constants: tuple[Constant, ...] = ()
    claims: tuple[Claim, ...] = ()
    remarks: tuple[str, ...] = ()
    """what a reader must know: where it falls short and why"""

    @property
    def notes(self) -> tuple[str, ...]:
        """Constants with their sources, claims and remarks, a sentence each."""
        fitted = {True: "calibrated", False: "given"}
        return (
            *(f"{item.name} = {item.value} ({fitted[item.calibrated]}: {item.source})" for item in self.constants),
            *(f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}" for claim in self.claims),
            *self.remarks,
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What must hold and does not."""
        cells = [
            f"{self.name}: {cell.row}, {cell.column}: ours {cell.ours}, paper {cell.paper}"
            for cell in self.cells
            if not cell.holds
        ]
        return (*cells, *(f"{self.name}: {claim.text}" for claim in self.claims if not claim.holds))


def table_values(table: Table) -> dict[str, Any]:
    """The table as plain values for JSON."""
    return {
        "table": table.name,
        "cells": [
            {
                "row": cell.row,
                "column": cell.column,
                "paper": cell.paper,
                "ours": cell.ours,
                "error": cell.error,
                "calibrated": cell.calibrated,
            }
            for cell in table.cells
        ],
        "notes": list(table.notes),
    }

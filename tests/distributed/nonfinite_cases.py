"""What is made not finite, and what is to be reported. Imports no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["CASES", "NAMES"]


def _case(
    zero: str, *, clips: bool = False, scaler: bool = False, logs: bool = False, told: tuple[Any, ...] | None
) -> dict[str, Any]:
    """`zero` is the parameter that becomes 0 before step 1, or target: the loss is not finite from there on."""
    return {"zero": zero, "clips": clips, "scaler": scaler, "logs": logs, "told": told}


_BY_NAME = {
    "output on the last stage": _case("2.scale", told=(1, "output", 1, 1, "2")),
    "output on the first stage": _case("0.scale", told=(1, "output", 0, 0, "0")),
    "gradient of a norm": _case("1.root", clips=True, told=(1, "gradient", 0, 0, "1")),
    "gradient that nobody looks at": _case("3.root", told=(2, "weights", 1, 1, "3")),
    "loss alone": _case("target", told=(1, "loss", None, None, None)),
    "scaled gradient": _case("1.root", clips=True, scaler=True, told=None),
    "scaled loss": _case("2.scale", scaler=True, told=(3, "output", 1, 1, "2")),
    "pipedream": _case("2.scale", told=(1, "gradient", 1, 1, "3")),
    "log": _case("2.scale", logs=True, told=(1, "output", 1, 1, "2")),
    "diverging": _case("far targets", told=None),
}
NAMES, CASES = list(_BY_NAME), list(_BY_NAME.values())
"""what is reported: step, what, rank, stage and the layer's module; None: nothing is"""

"""Pictures as PNG, for slides and papers that take no SVG."""

from __future__ import annotations

import importlib.util

from bapipe.errors import BaPipeError

__all__ = ["to_png"]

_ZOOM = 2.0


def to_png(svg: str) -> bytes:
    """The picture on white, twice as large as the SVG says. Needs resvg-py; text is in fonts of this machine."""
    if importlib.util.find_spec("resvg_py") is None:
        raise BaPipeError("PNG needs resvg-py, which is not installed; pip install 'bapipe[png]', or take --svg")
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", zoom=_ZOOM))

"""Runs a script as Python does, but searches no unreachable objects until the script asks for it (`gc.enable`).

Usage: quick_script.py SCRIPT … Torch's imports and captures make objects that stay: searched all the while, they
take a fifth more time.
"""

from __future__ import annotations

import gc
import runpy
import sys
from pathlib import Path

__all__ = ["QUICK_SCRIPT"]

QUICK_SCRIPT = str(Path(__file__).resolve())
"""what to put before a script and its arguments"""

if __name__ == "__main__":
    gc.disable()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

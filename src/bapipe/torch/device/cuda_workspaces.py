"""What profiling uses of torch's private parts, in one place: a test on a GPU fails when something here moves.

Written against torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch

__all__ = ["release_workspaces"]


def release_workspaces() -> None:
    """Hand back what matrix products on a GPU keep: 32 MB or so for each thread and stream, on first use."""
    torch._C._cuda_clearCublasWorkspaces()

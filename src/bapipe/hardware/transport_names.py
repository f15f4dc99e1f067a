"""The names of the transports between ranks, for those who only name them."""

from __future__ import annotations

__all__ = ["TRANSPORTS"]

TRANSPORTS = ("auto", "gloo", "staged", "ipc", "nccl")

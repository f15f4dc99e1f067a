"""Quantities as people write them. Inside BaPipe everything is seconds, bytes, bytes/s and FLOP/s.

GB = 10^9 bytes, GiB = 2^30 bytes; "Gb" with a small b is bits.
"""

from __future__ import annotations

import math
import re

from bapipe.errors import BaPipeError

__all__ = [
    "format_bandwidth",
    "format_bytes",
    "format_seconds",
    "format_seconds_range",
    "format_slower",
    "format_throughput",
    "parse_bandwidth",
    "parse_bytes",
    "parse_flops",
    "parse_seconds",
    "parse_share",
]

_PREFIX = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_LARGEST = 1e30
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"
_BYTES = re.compile(_NUMBER + r"([kKMGTP]i?)?(B|b|bit|bytes?)?\s*")
_BANDWIDTH = re.compile(_NUMBER + r"([kKMGTP]i?)?(B|b|bit)(?:/s|ps)\s*")
_FLOPS = re.compile(_NUMBER + r"([kKMGTP])?(?:FLOPS?|FLOP/s|flops?)?\s*")
_SECONDS = re.compile(_NUMBER + r"(s|ms|us|µs|ns|min|h)?\s*")
_SHARE = re.compile(_NUMBER + r"(%)?\s*")
_SECOND_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


def _plain(value: str | float, *, what: str) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value) or value < 0:
        raise BaPipeError(f"{what} must be a finite number of at least 0, got {value}")
    return _bounded(float(value), what=what, got=value)


def _bounded(number: float, *, what: str, got: str | float) -> float:
    """No quantity that anyone means is larger, and products of several that are would not be finite."""
    if number > _LARGEST:
        raise BaPipeError(f"{what} must be at most {_LARGEST:g} in plain units, got {str(got)[:60]}; correct it")
    return number


def parse_bytes(value: str | float, *, what: str = "a size") -> float:
    """Bytes of "16 GB", "512MiB" or a plain number of bytes."""
    number = _plain(value, what=what)
    if number is not None:
        return number
    match = _BYTES.fullmatch(str(value))
    if not match:
        raise BaPipeError(f"{what} must look like '16 GB' or '512 MiB', got '{str(value)[:60]}'")
    bits = match[3] in ("b", "bit")
    return _bounded(float(match[1]) * _PREFIX[match[2] or ""] / (8 if bits else 1), what=what, got=value)


def parse_bandwidth(value: str | float, *, what: str = "a bandwidth") -> float:
    """Bytes per second of "12 GB/s", "250 Gb/s", "10 Gbps" or a plain number of bytes per second."""
    number = _plain(value, what=what)
    if number is not None:
        return number
    match = _BANDWIDTH.fullmatch(str(value))
    if not match:
        raise BaPipeError(f"{what} must look like '12 GB/s' or '250 Gb/s', got '{str(value)[:60]}'")
    rate = float(match[1]) * _PREFIX[match[2] or ""] / (1 if match[3] == "B" else 8)
    return _bounded(rate, what=what, got=value)


def parse_flops(value: str | float, *, what: str = "a compute rate") -> float:
    """FLOP/s of "15.7 TFLOPS" or a plain number of FLOP/s."""
    number = _plain(value, what=what)
    if number is not None:
        return number
    match = _FLOPS.fullmatch(str(value))
    if not match:
        raise BaPipeError(f"{what} must look like '15.7 TFLOPS', got '{str(value)[:60]}'")
    return _bounded(float(match[1]) * _PREFIX[match[2] or ""], what=what, got=value)


def parse_seconds(value: str | float, *, what: str = "a time") -> float:
    """Seconds of "5 us", "1.5 ms" or a plain number of seconds."""
    number = _plain(value, what=what)
    if number is not None:
        return number
    match = _SECONDS.fullmatch(str(value))
    if not match:
        raise BaPipeError(f"{what} must look like '5 us' or '1.5 ms', got '{str(value)[:60]}'")
    return _bounded(float(match[1]) * _SECOND_UNITS[match[2] or "s"], what=what, got=value)


def parse_share(value: str | float, *, what: str = "a share") -> float:
    """0.05 of "5%", "0.05" or 0.05."""
    number = _plain(value, what=what)
    if number is not None:
        return number
    match = _SHARE.fullmatch(str(value))
    if not match:
        raise BaPipeError(f"{what} must look like '5%' or 0.05, got '{str(value)[:60]}'")
    return _bounded(float(match[1]) / (100 if match[2] else 1), what=what, got=value)


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Three digits in the largest unit that they fill: 0.99996 s is 1 s, not 1e+03 ms, and 2000 s no 2e+03 s."""
    rounded = float(f"{value:.3g}")
    factor, suffix = next((step for step in steps if abs(rounded) >= step[0]), steps[-1])
    number = f"{value / factor:.0f}" if abs(rounded / factor) >= 1000 else f"{rounded / factor:.3g}"
    return f"{number} {suffix}"


def format_bytes(value: float) -> str:
    """1.6e10 -> '16 GB'."""
    return _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def format_bandwidth(value: float) -> str:
    """1.2e10 -> '12 GB/s'."""
    return format_bytes(value) + "/s"


def format_seconds(value: float) -> str:
    """0.0153 -> '15.3 ms'."""
    return _scaled(value, _SECOND_STEPS)


def format_slower(share: float) -> str:
    """0.125 -> '12.5% slower', and 17.3 -> '18.3 times as long'."""
    return f"{1 + share:.3g} times as long" if share > 1 else f"{share:.1%} slower"


def format_seconds_range(value: float, low: float, high: float) -> str:
    """What stands behind a time in its unit: 0.0847, 0.0791, 0.0928 -> '(79–93)'."""
    unit = format_seconds(value).split()[1]
    ends = (end / _SECOND_UNITS[unit] for end in (low, high))
    return f"({'–'.join(f'{end:.0f}' if end >= 10 else f'{end:.2g}' for end in ends)})"


def format_throughput(value: float) -> str:
    """Samples per second in four digits: 926.84 -> '926.8', 20441.3 -> '20,440'."""
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if rounded >= 1e4 else f"{rounded:g}"

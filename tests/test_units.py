"""Quantities as people write them."""

from __future__ import annotations

import math

import pytest

from bapipe.errors import BaPipeError
from bapipe.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    format_seconds_range,
    format_slower,
    format_throughput,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16 GB", 16e9),
        ("16GiB", 16 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("8 Gb", 1e9),
        ("8 bit", 1),
        ("3 bytes", 3),
        ("7", 7),
        (" .5 TB ", 5e11),
        ("1e3 B", 1000),
        (4096, 4096),
        (0, 0),
    ],
)
def test_bytes(text: str | float, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("12 GB/s", 12e9), ("250 Gb/s", 31.25e9), ("10 Gbps", 1.25e9), ("1 GiB/s", 2**30), (5.0, 5)],
)
def test_bandwidth(text: str | float, value: float) -> None:
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(("text", "value"), [("15.7 TFLOPS", 15.7e12), ("1 GFLOP/s", 1e9), ("2P", 2e15), (3, 3)])
def test_flops(text: str | float, value: float) -> None:
    assert parse_flops(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5 us", 5e-6), ("5 µs", 5e-6), ("1.5 ms", 1.5e-3), ("2 min", 120), ("1 h", 3600), ("3", 3), (0.25, 0.25)],
)
def test_seconds(text: str | float, value: float) -> None:
    assert parse_seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "GB", "16 XB", "-1 GB", "1,5 GB", "nan", "inf", "16 GB/s", "1 GB 2 GB", "x" * 999]
)
def test_not_bytes(text: str) -> None:
    with pytest.raises(BaPipeError, match="memory must look like '16 GB'") as caught:
        parse_bytes(text, what="memory")
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_bandwidth, "12 GB"), (parse_flops, "fast"), (parse_seconds, "5 GB")]
)
def test_not_the_right_unit(parse: object, text: str) -> None:
    with pytest.raises(BaPipeError, match="must look like"):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_plain_numbers_must_make_sense(value: float) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_flops, parse_seconds):
        with pytest.raises(BaPipeError, match="must be a finite number of at least 0"):
            parse(value)


def test_formats() -> None:
    assert format_bytes(16e9) == "16 GB"
    assert format_bytes(999) == "999 B"
    assert format_bytes(0) == "0 B"
    assert format_bandwidth(12.5e9) == "12.5 GB/s"
    assert format_seconds(0.0153) == "15.3 ms"
    assert format_seconds(2) == "2 s"
    assert format_seconds(0.99996) == "1 s"
    assert format_seconds(2000) == "2000 s"
    assert format_seconds(3e-8) == "30 ns"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.5, "1.5"), (926.84, "926.8"), (9999.4, "9999"), (9999.6, "10,000"), (20441.3, "20,440")],
)
def test_throughput_has_four_digits_and_no_exponent(value: float, text: str) -> None:
    assert format_throughput(value) == text


@pytest.mark.parametrize("value", [1.0, 1500.0, 2.5e6, 16e9, 3e12])
def test_what_is_formatted_can_be_parsed(value: float) -> None:
    assert parse_bytes(format_bytes(value)) == value
    assert parse_bandwidth(format_bandwidth(value)) == value


def test_shares_and_ranges() -> None:
    assert [parse_share(value) for value in ("5%", "0.05", 0.05, "30 %")] == pytest.approx([0.05, 0.05, 0.05, 0.3])
    with pytest.raises(BaPipeError, match="--layer-error must look like '5%'"):
        parse_share("much", what="--layer-error")
    assert format_seconds_range(0.0847, 0.0791, 0.0928) == "(79–93)"
    assert format_seconds_range(1.24, 1.19, 1.31) == "(1.2–1.3)"
    assert format_seconds_range(0.99, 0.95, 1.04) == "(950–1040)"


def test_what_takes_over_twice_as_long_is_said_in_times() -> None:
    assert format_slower(0.125) == "12.5% slower"
    assert format_slower(1.0) == "100.0% slower"
    assert format_slower(17.32) == "18.3 times as long"

"""Sizes and speeds as people write them, and as they are shown."""

from __future__ import annotations

import re

import pytest

from lightning_shard.errors import ConfigurationError
from lightning_shard.text import listed, parse_bytes, parse_flops, parse_speed, show_bytes

# Sizes and speeds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("0.1GB", 10**8),
        ("141e9B", 141 * 10**9),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "80Gb", "-80GB", "0.1B", "80GB/s", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "speed"),
    [("400Gb/s", 50e9), ("400Gbps", 50e9), ("50GB/s", 50e9), ("3.2Tb/s", 400e9), ("1GiB/s", 2**30), ("8b/s", 1.0)],
)
def test_speeds(text: str, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["400Gb", "0GB/s", "fast"])
def test_no_speeds(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_speed(text)


def test_peaks() -> None:
    assert parse_flops("989TFLOPS") == parse_flops("989 TFLOP/s") == parse_flops("9.89e14") == 989e12
    with pytest.raises(ConfigurationError, match="'989 horses' is no peak"):
        parse_flops("989 horses")


def test_shown_sizes() -> None:
    assert [show_bytes(n) for n in (0, 17, 1234, 999_600, 80e9, 1.25e12)] == [
        "0",
        "17 B",
        "1.23 kB",
        "1e+03 kB".replace("1e+03", "1000"),
        "80 GB",
        "1.25 TB",
    ]


def test_lists_of_names_are_shown_to_a_length() -> None:
    assert listed([]) == "nothing"
    assert listed(f"p{i}" for i in range(6)) == "p0, p1, p2, p3, p4, p5"
    assert listed([3, 1, 2], most=2) == "3, 1 and 1 more"
    assert listed(["x" * 101, "y"]) == f"{'x' * 100}..., y"

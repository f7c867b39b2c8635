"""Sizes and speeds as people write them: "80GB", "80GiB", "400Gb/s", "989TFLOPS"; exact, and written back."""

from __future__ import annotations

import re
from fractions import Fraction

from lightning_shard.errors import ConfigurationError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_NUMBER = r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*"


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit: "80GB" is 80,000,000,000, "80GiB" is 85,899,345,920; other forms are refused."""
    found = re.fullmatch(_NUMBER + r"([kKMGTP]i?)?(B|b)", text)
    if found is None or (found[2] or "") not in {**_DECIMAL, **_BINARY}:
        raise ConfigurationError(
            f"{text!r} is no size. Write a number and a unit: 80GB (10**9 bytes each), 80GiB (2**30), 512MiB, 1024B."
        )
    if found[3] == "b":
        raise ConfigurationError(f"{text!r} is in bits (b), but a size of memory is in bytes: write {text[:-1]}B.")
    size = Fraction(found[1]) * {**_DECIMAL, **_BINARY}[found[2] or ""]
    if size.denominator != 1 or size <= 0:
        raise ConfigurationError(f"{text!r} is {float(size):g} bytes, but a size is a whole number of at least 1.")
    return int(size)


def parse_speed(text: str) -> float:
    """Bytes per second of a link: "400Gb/s" and "400Gbps" are bits, 50e9 bytes/s; "50GB/s" is bytes."""
    found = re.fullmatch(_NUMBER + r"([kKMGTP]i?)?(B|b)(?:/s|ps)", text)
    if found is None or (found[2] or "") not in {**_DECIMAL, **_BINARY}:
        raise ConfigurationError(
            f"{text!r} is no speed. Write a number and a unit: 400Gb/s (bits per second), 50GB/s (bytes per second)."
        )
    speed = Fraction(found[1]) * {**_DECIMAL, **_BINARY}[found[2] or ""] / (8 if found[3] == "b" else 1)
    if speed <= 0:
        raise ConfigurationError(f"{text!r} is no speed that anything crosses: it must be greater than 0.")
    return float(speed)


def parse_flops(text: str) -> float:
    """Floating point operations per second: "989TFLOPS", "9.89e14"."""
    found = re.fullmatch(_NUMBER + r"([kKMGTP])?(?:(?i:flops?)(?:/s)?)?", text)
    if found is None:
        raise ConfigurationError(f"{text!r} is no peak. Write operations per second: 989TFLOPS, 9.89e14.")
    peak = Fraction(found[1]) * _DECIMAL[found[2] or ""]
    if peak <= 0:
        raise ConfigurationError(f"{text!r} is no peak that anything reaches: it must be greater than 0.")
    return float(peak)


def show_bytes(count: float) -> str:
    """``"12.3 GB"``, ``"0"``: three digits, decimal units."""
    if count < 1:
        return "0"
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 999.5 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """``"1.23 s"``, ``"45.6 ms"``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"

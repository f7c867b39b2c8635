"""Text for people: tables in columns, what is nearest to a word that is not known, sizes and speeds with units."""

import difflib
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from lightning_shard.errors import ConfigurationError


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table with a line for each row, its cells below each other and two spaces between them.

    ``numbers``: all columns but the first are aligned to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def nearest(word: str, choices: Iterable[str], *, count: int = 1) -> list[str]:
    """At most ``count`` of the choices that resemble a word, the most similar first; case makes no difference."""
    lower = {choice.lower(): choice for choice in choices}
    return [lower[near] for near in difflib.get_close_matches(word.lower(), lower, count, cutoff=0.5)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``" Did you mean A or B?"`` with the choices nearest to a word, at most three; ``""`` where none is near."""
    near = nearest(word, choices, count=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


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


def first_line(error: BaseException, *, most: int = 200) -> str:
    """An error's type and the first line of what it says, of at most ``most`` characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:most]}" if lines else type(error).__name__


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

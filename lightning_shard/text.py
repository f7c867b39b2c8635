"""Text for people: tables, suggestions for unknown words, sizes and speeds with units."""

import difflib
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from lightning_shard.errors import ConfigurationError


def columns(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table with one line per row and two blanks between columns, ``numbers`` aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if numbers and i else cell.ljust(width) for i, (cell, width) in padded]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def nearest(word: str, choices: Iterable[str], *, count: int = 1) -> list[str]:
    """At most ``count`` of the choices that resemble ``word``, most similar first, ignoring case."""
    lower = {choice.lower(): choice for choice in choices}
    return [lower[near] for near in difflib.get_close_matches(word.lower(), lower, count, cutoff=0.5)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``" Did you mean A or B?"`` with at most three of the nearest choices, or ``""`` if none is near."""
    near = nearest(word, choices, count=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _parse(text: str, unit: str, wanted: str) -> tuple[Fraction, str]:
    """Number of ``text`` times its unit's factor, and the unit's end. The number is at least 1."""
    found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKMGTP]i?)?({unit})", text)
    number = Fraction(found[1]) * _UNITS.get(found[2] or "", 0) if found else Fraction(0)
    if found is None or number < 1:
        raise ConfigurationError(f"{text!r} is no {wanted}.")
    return number, found[3]


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit. "80GB" is 80,000,000,000, "80GiB" is 85,899,345,920. Other forms are refused."""
    wanted = "size. Write a number and a unit: 80GB (10**9 bytes each), 80GiB (2**30), 512MiB, 1024B"
    return int(_parse(text, "B", wanted)[0])


def parse_speed(text: str) -> float:
    """Bytes per second of a link. "400Gb/s" and "400Gbps" are bits, 50e9 bytes/s. "50GB/s" is bytes."""
    wanted = "speed. Write a number and a unit: 400Gb/s (bits per second), 50GB/s (bytes per second)"
    speed, unit = _parse(text, "[bB](?:/s|ps)", wanted)
    return float(speed / (8 if unit.startswith("b") else 1))


def parse_flops(text: str) -> float:
    """Floating point operations per second: "989TFLOPS", "9.89e14"."""
    return float(_parse(text, "(?i:flops?(?:/s)?)?", "peak. Write operations per second: 989TFLOPS, 9.89e14")[0])


def parse_count(value: object) -> int:
    """Count given by ``num_nodes`` or ``devices``, as a number or as indices. 0: all of a machine."""
    text = str(value)
    if re.search(r"[\[,(]", text):
        return len(re.findall(r"\d+", text))
    return int(text) if text.isdecimal() else 0


def listed(names: Iterable[object], *, most: int = 6) -> str:
    """The first ``most`` names, and the number of further ones."""
    shown = [name if len(name) <= 100 else f"{name[:100]}..." for name in map(str, names)]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "nothing") + more


def first_line(error: BaseException, *, most: int = 200) -> str:
    """An error's type and the first line of its message, cut to ``most`` characters."""
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

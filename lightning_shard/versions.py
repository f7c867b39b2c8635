"""Tested versions of other libraries, and the check for newer ones."""

import importlib.metadata
import platform
import re

TESTED = {
    "python": ("3.11", "3.13"),
    "torch": ("2.13.0", "2.15.0"),
    "lightning": ("2.6.4", "2.6.6"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "torchmetrics": ("1.5", "1.9"),
}
"""Library to its lowest and newest tested version. ``pyproject.toml`` requires the lowest and caps none."""


def tested(library: str) -> str:
    """Range of tested versions of ``library``, as text."""
    return " to ".join(dict.fromkeys(TESTED[library]))


def installed_version(library: str) -> str | None:
    """Installed version of a distribution, or of ``python``, without importing it. None: not installed."""
    if library == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """Numbers of a release: 2, 16, 0 of ``2.16.0.dev20260801+cpu``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def newer_than_tested() -> dict[str, str]:
    """Library to installed version, for those whose minor release is newer than the newest tested one."""
    versions = {library: installed_version(library) for library in TESTED}
    return {
        library: version
        for library, version in versions.items()
        if version is not None and version_numbers(version)[:2] > version_numbers(TESTED[library][1])[:2]
    }

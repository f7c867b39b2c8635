"""The versions of other libraries that this package was tested on, and whether installed ones are newer."""

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
"""Library to its lowest and its newest tested version. ``pyproject.toml`` requires the lowest and caps none."""


def tested(library: str) -> str:
    """The range of versions of ``library``, in words."""
    return " to ".join(dict.fromkeys(TESTED[library]))


def installed(library: str) -> str | None:
    """The version of a distribution, or of ``python``, without an import of it; None: it is not installed."""
    if library == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Those of a release, without marks of pre-releases and builds: 2, 16, 0 of ``2.16.0.dev20260801+cpu``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def newer_than_tested() -> dict[str, str]:
    """Library to installed version where its minor release is newer than the newest tested one. Patches don't count."""
    versions = {library: installed(library) for library in TESTED}
    return {
        library: version
        for library, version in versions.items()
        if version is not None and numbers(version)[:2] > numbers(TESTED[library][1])[:2]
    }

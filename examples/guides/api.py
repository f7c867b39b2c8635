"""Write ``api.md`` from the docstrings of all public names: ``python -m examples.guides.api``."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
MODULES = {
    "lightning_shard": "Strategies, options, precision and errors.",
    "lightning_shard.callbacks": "Callbacks for `Trainer(callbacks=[...])`.",
    "lightning_shard.tools": "The commands as functions.",
}


def page() -> str:
    """The page, as it has to be."""
    parts = ["# API", "Made from docstrings by `python -m examples.guides.api`. Edit those, not this page.", contents()]
    for module, text in MODULES.items():
        parts += [f"## {module}", text]
        owner = importlib.import_module(module)
        for name in owner.__all__:
            if not name.startswith("__"):
                parts += entry(name, getattr(owner, name))
    return "\n\n".join(parts) + "\n"


def contents() -> str:
    return "\n".join(f"- [{module}](#{module.replace('.', '')})" for module in MODULES)


def entry(name: str, value: Any) -> list[str]:
    """Heading, signature, text and arguments of one name."""
    text, _, rest = inspect.cleandoc(value.__doc__ or "").partition("Args:")
    text, _, raises = text.partition("Raises:")
    parts = [f"### {name}"]
    if not (isinstance(value, type) and issubclass(value, Exception)):
        parts.append(f"```text\n{signature(name, value)}\n```")
    parts.append(formatted(text))
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        rows = attribute_texts(value)
    else:
        if isinstance(value, type) and not rest:
            rest = inspect.cleandoc(value.__init__.__doc__ or "").partition("Args:")[2]
        rest, _, more = rest.partition("Raises:")
        raises = raises or more
        rows = arguments(rest)
    if rows:
        parts.append("\n".join(f"- `{key}`: {formatted(said)}".replace("\n", " ") for key, said in rows.items()))
    if raises.strip():
        parts.append("Raises " + "; ".join(f"`{key}`: {formatted(said)}" for key, said in arguments(raises).items()))
    return [part for part in parts if part]


def signature(name: str, value: Any) -> str:
    found = inspect.signature(value, eval_str=False)
    names = [str(p.replace(annotation=p.empty)) for p in found.parameters.values()]
    return textwrap.fill(f"{name}({', '.join(names)})", 110, subsequent_indent="    ")


def arguments(text: str) -> dict[str, str]:
    """The entries of an ``Args:`` or ``Raises:`` section."""
    lines = textwrap.dedent(text.partition("\n\n")[0].strip("\n")).splitlines()
    joined = re.sub(r"\n\s+", " ", "\n".join(lines))
    entries = (line.partition(": ") for line in joined.splitlines() if ": " in line)
    return {key.strip().lstrip("*"): said for key, _, said in entries}


def attribute_texts(cls: type) -> dict[str, str]:
    """The texts below the fields of a dataclass."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def formatted(text: str) -> str:
    """A docstring's text as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.strip()).replace("``", "`")
    text = re.sub(r"(\n    [^\n]*)\n\n(?=    )", r"\1\n    \n", text)  # an example stays in one block
    blocks = re.split(r"\n\n+", text)
    return "\n\n".join(
        f"```text\n{textwrap.dedent(b)}\n```" if b.startswith("    ") else b.replace("::", ":") for b in blocks
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

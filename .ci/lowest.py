"""Prints the lowest version of each requirement that pyproject.toml admits, as constraints for pip, a line each."""

import re
import sys
import tomllib
from pathlib import Path

for requirement in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
    found = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r} has no lower bound")
    print(f"{found[1]}=={found[2]}")

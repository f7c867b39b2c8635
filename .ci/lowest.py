"""Prints the lowest version of each requirement that pyproject.toml admits, a line each, as a constraints file for pip."""

import re
import sys
from pathlib import Path

for requirement in re.findall(
    r'^    "([^"]+)",$', Path("pyproject.toml").read_text().partition("[project.optional")[0], re.M
):
    found = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r} has no lower bound")
    print(f"{found[1]}=={found[2]}")

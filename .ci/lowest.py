"""Prints the lowest version of each requirement that pyproject.toml admits, as constraints for pip, a line each."""

import re
import sys
from pathlib import Path

required = Path("pyproject.toml").read_text().partition("[project.optional")[0]
for requirement in re.findall(r'^    "([^"]+)",$', required, re.MULTILINE):
    found = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r} has no lower bound")
    print(f"{found[1]}=={found[2]}")

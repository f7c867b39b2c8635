"""Which of DeepSpeed's kernels tests can use here: compiling one takes minutes, which the default tests do not have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_shard.engines.zero import kernels

NVME = ("async_io", "pin_memory")


def need(request: pytest.FixtureRequest, *names: str) -> None:
    """Skip the test where a kernel can't be compiled, and in the default tests also where it was not."""
    lacking = kernels.missing_build_tools(names, "cpu")
    if lacking:
        pytest.skip("; ".join(lacking))
    waiting = [name for name in names if not _is_compiled(name)]
    if waiting and "matrix" not in request.config.option.markexpr:
        pytest.skip(f"DeepSpeed's {', '.join(waiting)} is not compiled here; `pytest -m matrix` does it")


def _is_compiled(name: str) -> bool:
    import deepspeed
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    commands = folder / "build.ninja"
    # Another environment's DeepSpeed has its sources elsewhere, so that all would be compiled again.
    here = str(Path(deepspeed.__file__).parent)
    if (folder / "lock").exists() or not commands.exists() or here not in commands.read_text():
        return False
    # And so they would be with newer headers, of the system or of torch.
    told = subprocess.run(["ninja", "-n", "-C", str(folder)], capture_output=True, text=True, check=False)
    return "no work to do" in told.stdout

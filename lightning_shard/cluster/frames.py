"""Whose code an error was raised in."""

import sys
import traceback
from types import FrameType

# Packages whose frames are not the user's code.
_LIBRARIES = {
    *("deepspeed", "jsonargparse", "lightning", "lightning_shard", "lightning_utilities", "torch", "torchmetrics"),
    *("transformers", *sys.stdlib_module_names),
} - {"__main__"}


def user_frame(error: BaseException) -> str | None:
    """``file:line, in function`` of the innermost frame in the user's own code, or None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if package_of(frame) not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return None


def package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

"""Errors that say that memory is used up, however an allocator words them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp, the CUDA runtime, cuBLAS.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says so."""
    return any(_says_so(each) for each in _causes(error))


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def append_to_message(error: BaseException, text: str) -> None:
    """Let ``str(error)`` end with ``text``; the error's type and other arguments stay."""
    error.args = (f"{error.args[0] if error.args else type(error).__name__}\n{text}", *error.args[1:])

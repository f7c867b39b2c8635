"""Every error that this package raises on purpose.

::

    ShardError
    ├── ConfigurationError (ValueError)
    │   ├── MeshError
    │   ├── WrappingError
    │   ├── PrecisionError
    │   └── MaterializationError
    ├── PrecisionContractError
    ├── DataError (RuntimeError)
    └── CheckpointError (RuntimeError)
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── CheckpointCorruptError
        ├── CheckpointMismatchError
        ├── CheckpointReplacedError
        └── CheckpointUnreachableError

A message says the value, the rule that it breaks and the fix. Errors of one cause are raised on every rank.
"""

from collections import abc


class ShardError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(ShardError, ValueError):
    """A user's setting that can't work. It is raised before a process group, file or parameter is touched."""


class MeshError(ConfigurationError):
    """Mesh sizes that do not fit each other or the number of processes."""


class WrappingError(ConfigurationError):
    """Shard units, tied parameters or ignored modules that can't be formed."""


class PrecisionError(ConfigurationError):
    """A precision that does not exist here or that the chosen strategy can't honour."""


class MaterializationError(ConfigurationError):
    """A module on the meta device that can't be given values."""


class PrecisionContractError(ShardError):
    """A live tensor whose dtype breaks the aligned precision contract."""


class DataError(ShardError, RuntimeError):
    """Data that differs between ranks in a way that can't be trained on."""


class CheckpointError(ShardError, RuntimeError):
    """Base of the checkpoint errors."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint at this path, or one without its manifest (half-written)."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file that does not match its manifest, or has hostile content."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint whose tensors do not fit the model: missing, unexpected or reshaped keys."""


class CheckpointReplacedError(CheckpointError):
    """A checkpoint that was replaced or removed during the read. Reading again finds the new one."""


class CheckpointUnreachableError(CheckpointError):
    """An object store that does not answer, or refuses access."""


def chain(error: BaseException | None) -> abc.Iterator[BaseException]:
    """``error`` with its causes and contexts, each once. Such chains may be cyclic."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def raise_problems(problems: abc.Iterable[str], rule: str = "") -> None:
    """Raise one ConfigurationError with all ``problems``, a line for each, below the ``rule`` that they break."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigurationError(f"{rule}{': ' * bool(rule)}{unique[0]}.")
    if unique:
        head = f"{rule}, in {len(unique)} places" if rule else f"{len(unique)} things are wrong"
        raise ConfigurationError("\n  - ".join([f"{head}:", *(f"{problem}." for problem in unique)]))

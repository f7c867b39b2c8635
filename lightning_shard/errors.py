"""Every error that this package raises on purpose.

::

    ShardError
    ├── ConfigurationError (ValueError)   a user's setting that can't work; raised before anything was touched
    │   ├── MeshError                     sizes that do not fit the number of processes
    │   ├── WrappingError                 shard units, tied or ignored modules that can't be formed
    │   ├── PrecisionError                a precision that a strategy can't honour
    │   └── MaterializationError          a meta-device model that can't be given values
    ├── PrecisionContractError            a live tensor that breaks the aligned contract
    ├── DataError (RuntimeError)          data that differs between ranks in a way that can't be trained on
    └── CheckpointError (RuntimeError)
        ├── CheckpointNotFoundError (FileNotFoundError)   no such directory, or no manifest in it (half-written)
        ├── CheckpointCorruptError        a file that does not match its checksum, or hostile content
        ├── CheckpointMismatchError       missing, unexpected or reshaped keys
        ├── CheckpointReplacedError       another save or a removal was faster than who reads
        └── CheckpointUnreachableError    an object store that does not answer, or refuses

A message says the value that was found, the rule it breaks and what to do. Errors of one cause are raised on
every rank.
"""

from collections import abc


class ShardError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(ShardError, ValueError):
    """A user's setting that can't work; raised before a process group, file or parameter was touched."""


class MeshError(ConfigurationError):
    """Mesh sizes that do not fit each other or the number of processes."""


class WrappingError(ConfigurationError):
    """Shard units, tied parameters or ignored modules that can't be formed."""


class PrecisionError(ConfigurationError):
    """A precision that does not exist here or that the chosen strategy can't honour."""


class MaterializationError(ConfigurationError):
    """A module on the meta device that there is no way to give values."""


class PrecisionContractError(ShardError):
    """A live tensor whose dtype breaks the aligned precision contract."""


class DataError(ShardError, RuntimeError):
    """Data that differs between ranks in a way that can't be trained on."""


class CheckpointError(ShardError, RuntimeError):
    """Base of the checkpoint errors."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint at this path, or one without its manifest (half-written)."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file that does not match its manifest, or holds what must not be opened."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint whose tensors do not fit the model: missing, unexpected or reshaped keys."""


class CheckpointReplacedError(CheckpointError):
    """A checkpoint that was replaced or removed while it was read: another attempt reads what is there now."""


class CheckpointUnreachableError(CheckpointError):
    """An object store that does not answer, or refuses: what is there can't be told."""


def chain(error: BaseException | None) -> abc.Iterator[BaseException]:
    """``error`` and what it was raised from or beside, each once: such chains may be closed."""
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

"""A portable checkpoint on disk: names of files and tensors, checks, and reading from an open directory.

``NAME.ckpt/`` holds torch.distributed.checkpoint files (``.metadata`` and ``__<rank>_<n>.distcp``, tensors only, with
an optional state of the rank at the end), ``boxes.bin``, ``trainer.pt`` (everything else, loads with
``weights_only=True``) and ``manifest.json``. The manifest is written last. Without it there is no checkpoint.

Tensor keys are ``model.<fqn>``, ``optimizer.<i>.<fqn>.<slot>`` (split by the manifest's `SlotName`, since FQNs and
slots have dots) and ``average.<fqn>`` for averages of weights. Others are not read.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, ParamSpec, TypeVar

import torch

from lightning_shard.checkpoint.files.hashing import BLOCK, FileHash
from lightning_shard.checkpoint.files.location import Location, StorePath, StrPath
from lightning_shard.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError

T = TypeVar("T")
P = ParamSpec("P")

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer.pt"
METADATA = ".metadata"
BOXES = "boxes.bin"
DATA_SUFFIX = ".distcp"

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
AVERAGE_PREFIX = "average."

OPTIMIZER_STATES = "optimizer_states"
"""Key in ``trainer.pt`` of the optimizers' hyperparameters by group and their state outside of tensors."""

RUN_STATE = "lightning_shard"
"""Key in ``trainer.pt`` of state that Lightning's checkpoint lacks. Its ``ranks``, by rank, are in data files."""

EXTRA_STATE = "module_extra_state"  # key in ``trainer.pt`` of the module's state beyond parameters and buffers
AVERAGING_STATE = "averaging_state"
"""Lightning's key in ``trainer.pt`` of the number of updates (``n_averaged``) in the averages of weights."""

TEMPORARY, ASIDE = "tmp", "old"


class SlotName(NamedTuple):
    """Name of a tensor of optimizer state, such as ``exp_avg`` of ``encoder.weight`` in optimizer 0."""

    optimizer: int
    fqn: str
    slot: str

    @property
    def key(self) -> str:
        return f"{OPTIMIZER_PREFIX}{self.optimizer}.{self.fqn}.{self.slot}"


def other_form(path: StrPath) -> str | None:
    """The form that a path's name asks for: ``"full"`` (``*.full.ckpt``), one stock Lightning file, ``"hf"``
    (``*.hf.ckpt``, or ModelCheckpoint's ``.hf-v1.ckpt``), a folder for Hugging Face, or None, a portable directory.
    """
    found = re.search(rf"\.(full|hf)(-v\d+)?\.ckpt(\.{TEMPORARY}-\w+)?$", os.fspath(path))
    return found[1] if found else None


def is_own_name(name: str) -> bool:
    """True if a save may write a file of this name into a portable directory."""
    return name in (MANIFEST, TRAINER_STATE, METADATA, BOXES) or name.endswith(DATA_SUFFIX)


def without_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """Select the keys that begin with ``prefix``, and remove it."""
    return {key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of a file (see `lightning_shard.checkpoint.files.hashing`)."""

    size: int  # bytes
    sha256: str  # hexadecimal
    block: int = 0  # bytes of the blocks whose digests were hashed, 0 if the file itself was


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_relative(name: str) -> str:
    """Return ``name`` if it stays inside the checkpoint's directory, else CheckpointCorruptError."""
    path = PurePosixPath(name)
    if not path.parts or "\\" in name or "\0" in name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise CheckpointCorruptError(
            f"file name {name!r} is not a plain relative path; a checkpoint's files lie inside its directory"
        )
    return name


@contextlib.contextmanager
def damaged_if(said: str | Callable[[Exception], str], where: object = "") -> Iterator[None]:
    """Turn errors of the block into CheckpointCorruptError with the text ``said``. CheckpointErrors stay. ``where`` is
    put before the text of a CheckpointCorruptError.
    """
    try:
        yield
    except CheckpointError as error:
        if where and isinstance(error, CheckpointCorruptError):
            raise CheckpointCorruptError(f"{where}: {str(error)[:500]}") from error
        raise
    except Exception as error:
        text = f"{said}: {type(error).__name__}: {str(error)[:500]}" if isinstance(said, str) else said(error)
        raise CheckpointCorruptError(text) from error


def new_token() -> str:
    return secrets.token_hex(6)


def temporary_sibling(path: Path, token: str, kind: str = TEMPORARY) -> Path:
    """``.NAME.tmp-TOKEN``, which a save writes or deletes. `ASIDE`: the old one, if names can't be exchanged."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def leftovers(folder: Path, name: str = r".+\.ckpt(\..+)?", kinds: Iterable[str] = (TEMPORARY, ASIDE)) -> list[Path]:
    """Temporary siblings in ``folder`` of paths with a matching ``name``, of running or killed saves and removals."""
    pattern = re.compile(rf"\.{name}\.({'|'.join(kinds)})-[0-9a-f]{{4,12}}")
    return sorted(entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)) if folder.is_dir() else []


def current(path: Path) -> Path:
    """Return the place of the checkpoint ``path``. Between two renames it is a sibling, the new one if complete."""
    for aside in [] if os.path.lexists(path) else leftovers(path.parent, re.escape(path.name), [ASIDE]):
        new = temporary_sibling(path, aside.name.rpartition("-")[2])
        return new if (new / MANIFEST).exists() else aside
    return path


def checkpoint_names(folder: Location) -> list[Path] | list[StorePath]:
    """Entries of ``folder`` that may be checkpoints: those not hidden, and those that are being replaced."""
    if isinstance(folder, StorePath):
        return [folder / name for name in folder.folders()]
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    names = [name[1:].rpartition(f".{ASIDE}-")[0] if name.startswith(".") else name for name in names]
    return sorted({folder / name for name in names if name})


_PATIENCE_SECONDS = 10.0
ATTEMPTS, ATTEMPT_SECONDS = 25, 0.002
"""Attempts to read a path that saves replace meanwhile, before an error is raised, and the pause between them."""


class Directory:
    """An open directory with a shared lock, so that saves and removals do not delete it. Its files are opened by its
    descriptor. On a filesystem without locks they may be deleted. Reading then raises CheckpointReplacedError.
    """

    at_once_bytes = 1 << 20
    """Size up to which a box is read by one call."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path: Location = path
        self.descriptor = descriptor
        self.unchecked: dict[str, FileEntry] = {}
        """Files to compare with size and checksum when they are first opened."""
        self.close: Callable[[], object] = weakref.finalize(self, release, descriptor)
        """Release it now. Otherwise that happens with this object's end, which a traceback may delay."""

    def sizes(self) -> dict[str, int]:
        """Name to bytes of each regular file in the directory."""
        with os.scandir(self.descriptor) as entries:
            return {e.name: e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False)}

    def open(self, name: str) -> BinaryIO:
        """Open a regular file in the directory. CheckpointCorruptError for a link, a pipe, a device or a missing file.
        CheckpointReplacedError if the directory was replaced on a filesystem without locks, or removed by hand.
        """
        check_relative(name)
        stream = self._open(name)
        if (entry := self.unchecked.pop(name, None)) is not None:
            self.check(name, entry)
        return stream

    def _open(self, name: str) -> BinaryIO:
        where, flags = self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        *folders, last = name.split("/")
        try:
            with contextlib.ExitStack() as opened:
                at = self.descriptor
                for folder in folders:
                    at = os.open(folder, flags | os.O_DIRECTORY, dir_fd=at)
                    opened.callback(os.close, at)
                # Opening a pipe would block, and opening a device may act. A link leads anywhere.
                if not stat.S_ISREG(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode):
                    raise CheckpointCorruptError(f"{where} is not a regular file inside the checkpoint")
                return os.fdopen(os.open(last, flags, dir_fd=at), "rb")
        except OSError as error:
            self.check_current()
            raise CheckpointCorruptError(f"{where} can't be read ({error.strerror})") from error

    def check(self, name: str, entry: FileEntry, take: Callable[[bytes], object] | None = None) -> None:
        """Compare a file with its size and checksum, and pass its bytes to ``take``. Errors as of `open`."""
        where, digest = self.path / name, FileHash(entry.block)
        with self.open(name) as stream:
            if (size := stream.seek(0, os.SEEK_END)) != entry.size:
                raise CheckpointCorruptError(f"{where} has {size} bytes, {MANIFEST} says {entry.size}")
            stream.seek(0)
            try:
                # Threads hash one block while the next one is read.
                hashed: list[Future[None]] = []
                while block := stream.read(BLOCK):
                    hashed, before = digest.begin_update(block), hashed
                    for job in before:
                        job.result()
                    if take is not None:
                        take(block)
            except OSError as error:
                self.check_current()
                raise CheckpointCorruptError(f"{where} can't be read: {error}") from error
        if digest.entry()[0] != entry.sha256:
            raise CheckpointCorruptError(
                f"{where} does not match its checksum: it was damaged or changed after it was written"
            )

    def read(self, name: str, files: Mapping[str, FileEntry]) -> bytes:
        """Return the contents of one of ``files`` after `check`: the very bytes that were checked."""
        if name not in files:
            raise CheckpointCorruptError(f"{self.path}: the manifest does not list {name}")
        blocks: list[bytes] = []
        self.check(name, files[name], blocks.append)
        return b"".join(blocks)

    def damaged(self, names: Iterable[str], files: Mapping[str, FileEntry]) -> dict[str, str]:
        """Name to error of those files among ``names`` that differ from their entries in ``files``."""
        damage: dict[str, str] = {}
        for name in names:
            try:
                self.check(name, files[name])
            except CheckpointCorruptError as error:
                damage[name] = str(error)
        return damage

    def check_current(self) -> None:
        """CheckpointReplacedError if the path leads to another directory now, or to none."""
        if not _is_at(Path(str(self.path)), self.descriptor):
            raise CheckpointReplacedError(f"{self.path} was replaced or removed while it was read: read it again")


def open_directory(path: str | os.PathLike[str], *, lock: bool = True) -> Directory:
    """Open ``path``, or its sibling after an interrupted replacement. FileNotFoundError, which may pass in a moment."""
    path, patience = Path(path), time.monotonic() + _PATIENCE_SECONDS
    while True:
        now_at = current(path)
        directory = Directory(path, os.open(now_at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        # A save holds the lock of a directory that it is publishing.
        locked = not lock or try_lock(directory.descriptor, fcntl.LOCK_SH)
        # A directory that was replaced before the lock may be deleted by now.
        if locked and _is_at(now_at, directory.descriptor):
            return directory
        if time.monotonic() > patience:
            raise CheckpointError(f"{path} was replaced or locked by a save for {_PATIENCE_SECONDS:.0f} s")
        time.sleep(ATTEMPT_SECONDS)


def again_if_replaced(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``read`` to be called again after CheckpointReplacedError."""

    @wraps(read)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(CheckpointReplacedError):
                return read(*args, **kwargs)
            time.sleep(ATTEMPT_SECONDS)
        return read(*args, **kwargs)

    return again


def try_lock(descriptor: int, how: int) -> bool:
    """Take a lock (``fcntl.LOCK_SH`` or ``LOCK_EX``). False while another process holds a conflicting one."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a filesystem without locks
    return True


def has_locks(folder: Path) -> bool:
    """True if the filesystem of ``folder`` has locks. Lustre and NFS may be mounted without."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def release(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        # Closing is not enough: a process forked meanwhile (a DataLoader's worker) has it open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)

"""Read and change a full parameter, gradient or optimizer state by FQN, the same on every engine.

`unshard` makes a fitted module plain. `load_from_checkpoint` makes one from a checkpoint directory, on one process.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping, ValuesView
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_shard.checkpoint.files.layout import StrPath
from lightning_shard.checkpoint.load import load_training_state, open_checkpoint
from lightning_shard.checkpoint.optimizer_state import optimizer_slot
from lightning_shard.checkpoint.state_dict import follow_names
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.materialize import Materializer
from lightning_shard.engines.unsharding import unshard_module
from lightning_shard.errors import ConfigurationError
from lightning_shard.ranks import Ranks, alone
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.tensors.flat import LiveTensor
from lightning_shard.tensors.full import gather_full, scatter_full
from lightning_shard.tensors.names import Names, fqns, named_parameters
from lightning_shard.tensors.tracing import version
from lightning_shard.text import did_you_mean, listed


def full_tensor(trainer: Trainer, fqn: str, kind: str = "parameter") -> Tensor | None:
    """A copy of a full tensor, the same on every rank. Collective: all ranks call it.

    Args:
        trainer: in a run with a strategy of this package. Optimizer state and gradients exist in a fit only.
        fqn: the parameter's name in the LightningModule, as in its ``named_parameters()`` before the fit.
        kind: "parameter": the master weights, which the optimizer steps. "gradient": reduced over all ranks, from
            backward to the step (ZeRO-1 and -2 of one optimizer reduce it once, in manual optimization at the step:
            from ``on_before_optimizer_step``). Else the optimizer's name of a slot, such as "exp_avg".

    Returns:
        The tensor in its own dtype. None for a gradient or a slot that does not exist.

    Raises:
        ConfigurationError: another strategy, or no such parameter, with the nearest names.
    """
    names, find = _finder(*_engine_of(trainer), kind)
    live = find(names.canonical(fqn))
    return None if live is None else gather_full(live, device=trainer.strategy.root_device)


def set_full_tensor(trainer: Trainer, fqn: str, value: Tensor, kind: str = "parameter") -> None:
    """Write a full tensor on every rank. The next forward sees it. Collective: all ranks call it.

    Args:
        trainer: as for `full_tensor`.
        fqn: as for `full_tensor`.
        value: equal on all ranks, of the full tensor's shape. It is cast to the tensor's dtype.
        kind: as for `full_tensor`.

    Raises:
        ConfigurationError: as for `full_tensor`, a missing gradient or slot, or another shape.
    """
    engine, checkpoints = _engine_of(trainer)
    names, find = _finder(engine, checkpoints, kind)
    if (live := find(names.canonical(fqn))) is None:
        raise ConfigurationError(f"{fqn} has no {kind} now: look with full_tensor, which gives None then.")
    _write(live, fqn, value, kind)
    if kind == "parameter":
        engine.refresh_model_weights()


@contextmanager
def full_parameters(
    trainer: Trainer, names: str | Iterable[str] | None = None, kind: str = "parameter", write: bool = False
) -> Generator["FullTensors", None, None]:
    """Read, and with ``write`` change, full parameters or gradients, the same on every engine and rank.

    Collective: all ranks enter and leave it, take the same tensors in the same order and write the same values. It may
    be entered in every hook and between steps, but not inside of ``training_step``, and with ``write`` not between
    forward and backward. ::

        with full_parameters(trainer, "*.weight", write=True) as tensors:
            for name, weight in tensors.items():  # one full tensor at a time
                weight.clamp_(-1, 1)

    A tensor is gathered when it is taken. With ``write`` it may be changed in place. One from a loop over ``items()``
    or ``values()`` is written when the loop goes on, so that memory holds one full tensor, and a later change of it is
    refused. One from ``tensors[name]`` is kept, and written on leaving. ``tensors[name] = value`` writes at once.
    Forward sees the new values from leaving on. After an exception inside nothing more is written, and nothing
    communicates.

    Args:
        trainer: as for `full_tensor`.
        names: FQNs, or patterns such as "encoder.*.weight", one or several. None: all parameters, frozen ones too. A
            tied parameter is included once, and is found by each of its names.
        kind: "parameter" or "gradient", as for `full_tensor`. Parameters without a gradient are left out.
        write: write changes back. Else the tensors are copies.

    Yields:
        A mapping from FQN to full tensor, in its own dtype, without ``requires_grad``.

    Raises:
        ConfigurationError: another strategy, no such parameter, ranks that ask for other tensors, a value of another
            shape.
    """
    engine, checkpoints = _engine_of(trainer)
    if kind not in ("parameter", "gradient"):
        raise ConfigurationError(f'kind is {kind!r}, but must be "parameter" or "gradient": full_tensor reads others.')
    asked = _requested(names, fqns(checkpoints.module), named_parameters(checkpoints.module))
    if kind == "gradient":  # a rank may lack one
        known, find = _finder(engine, checkpoints, kind)
        asked = {fqn: name for fqn, name in asked.items() if find(fqn) is not None}
    _refuse_other_requests(asked, kind, write=write)
    if kind == "parameter":
        known, find = _finder(engine, checkpoints, kind)
    live = {name: tensor for fqn, name in asked.items() if (tensor := find(fqn)) is not None}
    begin = None if not write else engine.begin_writing if kind == "parameter" else lambda: None
    tensors = FullTensors(live, asked, known, kind, begin_writing=begin, device=trainer.strategy.root_device)
    try:
        yield tensors
        for name, full in tensors.kept.items():
            tensors.write(name, full)
    finally:
        tensors.closed = True
        tensors.kept.clear()
    if write and kind == "parameter":
        engine.refresh_model_weights()
    tensors.refuse_late_changes()


class FullTensors(Mapping[str, Tensor]):
    """Full tensors by name, as `full_parameters` yields them."""

    def __init__(
        self,
        live: Mapping[str, LiveTensor],
        shown: Mapping[str, str],
        names: Names,
        kind: str,
        *,
        begin_writing: Callable[[], None] | None,
        device: torch.device,
    ) -> None:
        """``shown``: FQN to key in ``live``. ``begin_writing`` is called before each write. None: read only."""
        self._live, self._shown, self._names, self._kind = live, shown, names, kind
        self._begin_writing, self._device, self.closed = begin_writing, device, False
        self.kept: dict[str, Tensor] = {}  # written on leaving
        self._written: list[tuple[str, Tensor, int]] = []  # name, `_change_counter` and count when it was written

    def __getitem__(self, name: str) -> Tensor:
        key = self._key(name)
        if key in self.kept:
            return self.kept[key]
        with torch.inference_mode(mode=False):  # Inference tensors count no changes.
            full = gather_full(self._live[key], device=self._device)
        if self._begin_writing is not None:
            self.kept[key] = full
        return full

    def __setitem__(self, name: str, value: Tensor) -> None:
        key = self._key(name)
        if self._begin_writing is None:
            raise ConfigurationError("full_parameters was entered to read, but a tensor is set: give it write=True.")
        self.write(key, value)
        if (kept := self.kept.get(key)) is not None and kept is not value:
            del self.kept[key]
            self._written.append((key, *_change_counter(kept)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def items(self) -> ItemsView[str, Tensor]:
        return _OneByOne(self)

    def values(self) -> ValuesView[Tensor]:
        return _ValuesOneByOne(self)

    def write_passed(self, name: str) -> None:
        """Write and drop a tensor that a loop has passed."""
        if (full := self.kept.pop(name, None)) is not None:
            self.write(name, full)
            self._written.append((name, *_change_counter(full)))

    def write(self, name: str, full: Tensor) -> None:
        assert self._begin_writing is not None
        self._begin_writing()
        _write(self._live[name], name, full, self._kind)

    def refuse_late_changes(self) -> None:
        """ConfigurationError: a tensor was changed after it had been written."""
        if late := [name for name, counter, count in self._written if version(counter) != count]:
            raise ConfigurationError(
                f"the full {self._kind} of {listed(late, most=3)} was changed after it had been written, which happens "
                "when a loop over full_parameters goes on. Change it inside of the loop, or take tensors[name], which "
                "is written on leaving."
            )

    def _find(self, name: str) -> str | None:
        unwrapped = self._names.unwrapped(name)
        return self._shown.get(self._names.aliases.get(unwrapped, unwrapped))

    def _key(self, name: str) -> str:
        if self.closed:
            raise ConfigurationError("full_parameters was left: take and write its tensors inside of the with block.")
        if (key := self._find(name)) is None:
            raise KeyError(f"no {self._kind} {name!r} is among these.{did_you_mean(name, self._live)}")
        return key


class _OneByOne(ItemsView[str, Tensor]):
    """A tensor that was not taken before is written and dropped at the next one."""

    _mapping: FullTensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._mapping
        for name in tensors:
            kept = name in tensors.kept
            yield name, tensors[name]  # no local variable: it would keep the tensor until the next one is gathered
            if not kept:
                tensors.write_passed(name)


class _ValuesOneByOne(ValuesView[Tensor]):
    _mapping: FullTensors

    def __iter__(self) -> Iterator[Tensor]:
        return (full for _, full in self._mapping.items())


def _change_counter(full: Tensor) -> tuple[Tensor, int]:
    """An empty tensor that shares the version counter of ``full``, and the present count."""
    counter = full.detach()  # It shares the counter, and keeps it with other data.
    counter.data = torch.empty(0, dtype=full.dtype, device=full.device)
    return counter, version(counter)


def _requested(names: str | Iterable[str] | None, known: Names, parameters: Mapping[str, Any]) -> dict[str, str]:
    """FQN to requested name, each tensor once."""
    if names is None:
        return dict(zip(parameters, parameters, strict=True))
    asked: dict[str, str] = {}
    for name in [names] if isinstance(names, str) else names:
        found = [name]
        if {"*", "?"} & set(name):
            found = [fqn for fqn in (*parameters, *known.aliases) if fnmatchcase(fqn, name)]
            if not found:
                raise ConfigurationError(f"no parameter of the module matches {name!r}.")
        for fqn in found:
            asked.setdefault(known.canonical(fqn), fqn)
    return asked


def _refuse_other_requests(asked: Mapping[str, str], kind: str, *, write: bool) -> None:
    """Refuse, on all ranks, requests that differ between ranks: their collectives would not match."""
    digests = Ranks.of().gather((kind, write, hashlib.sha256("\n".join(asked).encode()).hexdigest()))
    if rank := next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0):
        raise ConfigurationError(
            f"full_parameters is a collective, but rank {rank} asks for other tensors than rank 0, in another order, "
            f"of another kind or to write ({listed(asked, most=3)} here). Enter it with the same ones on all ranks."
        )


def _engine_of(trainer: Trainer) -> tuple[Engine, Checkpoints]:
    strategy = trainer.strategy
    if not isinstance(checkpoints := getattr(strategy, "checkpoints", None), Checkpoints):
        raise ConfigurationError(
            f"the Trainer's strategy is {type(strategy).__name__}, but full tensors are read from a strategy of "
            "lightning_shard, such as shard_fsdp."
        )
    return strategy.engine, checkpoints  # type: ignore[attr-defined]


def _write(live: LiveTensor, fqn: str, value: Tensor, kind: str) -> None:
    if tuple(live.shape) != tuple(value.shape):
        raise ConfigurationError(
            f"the new {kind} of {fqn} has shape {tuple(value.shape)}, but must have {tuple(live.shape)}: all ranks "
            "give the full tensor."
        )
    scatter_full(value, live)


def _finder(engine: Engine, checkpoints: Checkpoints, kind: str) -> tuple[Names, Callable[[str], LiveTensor | None]]:
    """Names, and a function from canonical FQN to live tensor of ``kind``. All ranks call it."""
    if kind == "parameter":
        checkpoints.synchronize()
    elif kind == "gradient":
        engine.reshard_and_sync_masters()
    else:
        engine.before_saving()
    names = fqns(checkpoints.module)
    if kind == "parameter":
        masters = engine.masters()
        return names, lambda name: masters.get(name, names.tensors[name])
    if kind == "gradient":
        return names, lambda name: engine.gradient(name, names.tensors[name])
    return names, lambda name: optimizer_slot(engine.optimizers(), names, name, kind)


N = TypeVar("N", bound=nn.Module)


def unshard(module: N, *, rank0_only: bool = False, device: torch.device | str = "cpu") -> N:
    """Make a fitted module plain, in place: its own class, full parameters, no hooks of an engine.

    Collective: all ranks call it, after ``fit``. Then ``save_pretrained``, ``torch.save(module.state_dict())``, calls
    outside of the Trainer, copies and other Trainers work as before the fit. Parameters have the values and dtype of
    the master weights. Each process needs memory for all of them. `unshard_after_fit` of a strategy does it by itself.
    Save a checkpoint with optimizer state before it, and make optimizers of the module's new parameters after it.

    Args:
        module: the LightningModule that was fitted, or under FSDP a part of it.
        rank0_only: leave the parameters to rank 0: on other ranks they are on the meta device, without values.
        device: for the parameters and buffers.

    Returns:
        ``module``.

    Raises:
        ConfigurationError: a run of the module goes on, or under ZeRO-3 it is only a part of the fitted one.
    """
    if isinstance(module, LightningModule):
        with suppress(RuntimeError):  # attached to no Trainer
            if module.trainer.state.status == TrainerStatus.RUNNING:
                raise ConfigurationError(
                    "unshard is called in a run, which goes on with the shards: call it after fit, or set "
                    "unshard_after_fit on the strategy. full_parameters gives full values inside of a run."
                )
    unshard_module(module, device=torch.device(device), keep=not rank0_only or Ranks.of().is_first)
    return module


M = TypeVar("M", bound=LightningModule)


@alone()
def load_from_checkpoint(module_class: type[M], path: StrPath, *, strict: bool | None = None, **kwargs: Any) -> M:
    """Build a module as ``module_class.load_from_checkpoint`` does and fill it from the directory ``path``.

    Each process loads by itself. Every tensor is full and on the host. A module that ``configure_model`` builds on the
    meta device gets memory first, and needs every tensor to be in the checkpoint.

    Args:
        module_class: class of the trained module. Its ``save_hyperparameters`` values in the checkpoint are its
            arguments.
        path: a checkpoint directory.
        strict: refuse missing and unexpected tensors. None: the module's own ``strict_loading``.
        **kwargs: arguments that replace, or add to, the checkpoint's.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one that does not fit.
    """
    checkpoint = open_checkpoint(path)
    state = checkpoint.trainer_state
    stand_in = io.BytesIO()
    torch.save({**{k: v for k, v in state.items() if k != "optimizer_states"}, "state_dict": {}}, stand_in)
    stand_in.seek(0)
    state_dict: Mapping[str, Any] = {}

    def follow(module: M, loaded: dict[str, Any]) -> None:
        nonlocal state_dict
        state_dict = loaded["state_dict"] = checkpoint.state_dict()
        module_class.on_load_checkpoint(module, loaded)
        state_dict, loaded["state_dict"] = loaded["state_dict"], {}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The state dict in .* contains no parameters|Found keys that are in")
        # Lightning builds the module and calls its hooks. The tensors are loaded below.
        hooks = {"on_load_checkpoint": follow, "load_state_dict": nn.Module.load_state_dict}
        reader = cast(type[M], type(module_class.__name__, (module_class,), hooks))
        module = reader.load_from_checkpoint(stand_in, strict=False, weights_only=True, **kwargs)
        module.__class__ = module_class
    # Meta tensors get memory, and buffers that a checkpoint does not have get their values.
    materializer = Materializer(module, device=torch.device("cpu"), seed=0)
    materializer.fill(materializer.fqns)
    strict = module.strict_loading if strict is None else strict
    edited, strict = follow_names(module, checkpoint.manifest, state_dict, strict=strict)
    load_training_state(checkpoint, module=module, strict=strict, state=edited)
    return module

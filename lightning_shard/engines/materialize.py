"""Initialize models that were built on the meta device, with the same values on every engine, mesh and world size.

A module's own tensors are created in full and initialised under a seed derived from the run's seed and the module's
FQN. The caller shards each unit before it fills the next one, so a rank has its shards and one full unit.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.errors import MaterializationError
from lightning_shard.tensors.names import own_tensors, unwrapped_modules
from lightning_shard.text import listed


def derived_seed(seed: int, fqn: str) -> int:
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


class Materializer:
    """Replaces the meta tensors of a module tree with full, initialised tensors."""

    def __init__(self, root: nn.Module, *, device: torch.device, seed: int) -> None:
        """Find the initializer of each module under ``root``: ``_init_weights(module)`` of the nearest enclosing module
        that has it, in Hugging Face's style, else its own ``reset_parameters`` (``_reset_parameters`` of
        ``nn.MultiheadAttention``). ``seed`` is the run's, equal on all ranks. MaterializationError: modules have none.
        """
        self.fqns = {module: fqn for fqn, module in unwrapped_modules(root)}
        self.initializers = _find_initializers(root)
        """The initializer of each module that owns a tensor on the meta device."""
        self._device = device
        self._seed = seed
        # By the id of the replaced meta tensor, so that tied parameters stay tied. The reference to the meta tensor
        # keeps its id unique. The new tensor is a weak reference, or full tensors would outlive their sharding.
        self._created: dict[int, tuple[Tensor, weakref.ref[Tensor]]] = {}

    def created(self) -> set[int]:
        """The ids of the created tensors that are alive."""
        return {id(made()) for _, made in self._created.values()}

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Replace and initialise the meta tensors of ``modules``. MaterializationError: a tensor was left unset."""
        for module in modules:
            if module not in self.initializers or not (fresh := self._replace_meta_tensors(module)):
                continue
            initialize, reset = self.initializers[module], _own_reset(module)
            # Loaded tensors, and those tied to another module's.
            kept = {name: tensor.clone() for name, tensor in own_tensors(module).items() if name not in fresh}
            self._initialize(module, [initialize])
            missed = _unset(module, fresh)
            if missed and reset is not None:
                # As on a real device: first the constructor's values, then the enclosing model's.
                self._initialize(module, [reset, initialize])
                missed = _unset(module, fresh)
            if missed:
                raise MaterializationError(
                    f"The initialisation of {self.fqns[module] or '(root)'} ({type(module).__name__}) left "
                    f"{listed(missed)} without values. A module that is built on the meta device must set all of "
                    "its own parameters and buffers, also non-persistent ones, in reset_parameters()."
                )
            for name, value in kept.items():
                own_tensors(module)[name].copy_(value)
            for name, meta in fresh.items():
                if isinstance(meta, DTensor):
                    # The user applied ``fully_shard`` on the meta device. Shard the full tensor in the same way.
                    full = own_tensors(module)[name].detach()
                    shard = distribute_tensor(full, meta.device_mesh, meta.placements, src_data_rank=None)
                    as_parameter = isinstance(meta, nn.Parameter)
                    setattr(module, name, nn.Parameter(shard, meta.requires_grad) if as_parameter else shard)
                    self._created[id(meta)] = (meta, weakref.ref(own_tensors(module)[name]))

    def _initialize(self, module: nn.Module, steps: Iterable[Callable[[], object]]) -> None:
        devices = [self._device] if self._device.type != "cpu" else []
        with torch.random.fork_rng(devices=devices, device_type=self._device.type if devices else "cuda"):
            torch.manual_seed(derived_seed(self._seed, self.fqns[module]))
            for step in steps:
                step()

    def _replace_meta_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Replace the meta tensors of ``module`` by unset tensors. Returns the meta tensors met first here, by name."""
        fresh: dict[str, Tensor] = {}
        for name, tensor in own_tensors(module).items():
            if not tensor.is_meta:
                continue
            made = self._created[id(tensor)][1]() if id(tensor) in self._created else None
            if made is None:
                made = _unset_like(tensor, self._device)
                made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                self._created[id(tensor)] = (tensor, weakref.ref(made))
                fresh[name] = tensor
            # By attribute, because modules such as nn.LSTM also keep a list of their parameters.
            setattr(module, name, made)
        return fresh


def _find_initializers(root: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    modules = dict(root.named_modules())
    on_meta = {fqn: m for fqn, m in modules.items() if any(t.is_meta for t in own_tensors(m).values())}
    found = {module: _initializer(module, fqn, modules) for fqn, module in on_meta.items()}
    if without := [f"{fqn or '(root)'} ({type(m).__name__})" for fqn, m in on_meta.items() if found[m] is None]:
        raise MaterializationError(
            f"The model was built on the meta device, and {len(without)} of its modules can't be given values: "
            f"{listed(without)}. Give each a reset_parameters() method that initialises its own parameters and "
            "buffers, or build them on a real device in configure_model."
        )
    return found  # type: ignore[return-value]


def _initializer(module: nn.Module, fqn: str, modules: Mapping[str, nn.Module]) -> Callable[[], object] | None:
    prefixes = [fqn.rsplit(".", n)[0] for n in range(fqn.count(".") + 1)]
    for name in [*prefixes, ""]:
        init_weights = getattr(modules[name], "_init_weights", None)
        if callable(init_weights):
            return lambda: init_weights(module)
    return _own_reset(module)


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    own = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, own), None)


def _unset_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor filled with NaN or the smallest integer, which `_is_unset` recognises."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if empty.is_floating_point() or empty.is_complex():
        return empty.fill_(float("nan"))
    return empty.zero_() if empty.dtype == torch.bool else empty.fill_(torch.iinfo(empty.dtype).min)


def _unset(module: nn.Module, names: Iterable[str]) -> list[str]:
    # Read again, because an initializer may have assigned a new tensor.
    own = own_tensors(module)
    return [name for name in names if _is_unset(own[name])]


def _is_unset(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    smallest = torch.iinfo(tensor.dtype).min
    # Not for unsigned dtypes, whose smallest value 0 is common.
    return smallest != 0 and bool((tensor == smallest).any())

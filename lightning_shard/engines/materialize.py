"""Values for models that were built on the meta device: the same on every engine, mesh and world size.

A module's own tensors are created whole and initialised under a seed derived from the run's seed and the module's
FQN, so the values depend on nothing else: not on the order, the cut or the number of ranks. The caller cuts them
before it asks for the next unit's, so that a rank never holds more than its shards and one unit.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.errors import MaterializationError

Created = dict[int, tuple[Tensor, "weakref.ref[Tensor]"]]
"""What was made for each meta tensor, by its id. The meta tensor is kept, so that its id stays its own; what was
made is not, or whole tensors would outlive their cutting."""


def derived_seed(seed: int, fqn: str) -> int:
    """A 63-bit seed from the run's seed and a module's FQN."""
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def meta_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Modules under ``root`` that own a parameter or buffer on the meta device, by FQN."""
    return {fqn: m for fqn, m in root.named_modules() if any(t.is_meta for t in _own_tensors(m).values())}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return {**own, **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def find_initializers(root: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    """How each module of `meta_modules` is given its values.

    A Hugging Face style ``_init_weights(module)`` of the nearest enclosing module that has one, else the module's
    own ``reset_parameters`` (or ``_reset_parameters``, as ``nn.MultiheadAttention`` spells it).

    Raises:
        MaterializationError: modules that have none of them, all named at once.
    """
    modules = dict(root.named_modules())
    found: dict[nn.Module, Callable[[], object]] = {}
    without: list[str] = []
    for fqn, module in meta_modules(root).items():
        initialize = _initializer(module, fqn, modules)
        if initialize is None:
            without.append(f"{fqn or '(root)'} ({type(module).__name__})")
        else:
            found[module] = initialize
    if without:
        raise MaterializationError(
            f"The model was built on the meta device, and {len(without)} of its modules can't be given values: "
            f"{', '.join(without)}. Give each a reset_parameters() method that initialises its own parameters and "
            "buffers, or build them on a real device in configure_model."
        )
    return found


def _initializer(module: nn.Module, fqn: str, modules: Mapping[str, nn.Module]) -> Callable[[], object] | None:
    prefixes = [fqn.rsplit(".", cut)[0] if cut else fqn for cut in range(fqn.count(".") + 1)]
    for name in [*prefixes, ""]:
        init_weights = getattr(modules[name], "_init_weights", None)
        if callable(init_weights):
            return lambda: init_weights(module)
    return _own_reset(module)


def _own_reset(module: nn.Module) -> Callable[[], object] | None:
    for method in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, method, None)
        if callable(reset):
            return reset
    return None


@torch.no_grad()
def materialize(
    modules: Iterable[nn.Module],
    *,
    device: torch.device,
    seed: int,
    fqns: Mapping[nn.Module, str],
    initializers: Mapping[nn.Module, Callable[[], object]],
    created: Created,
) -> None:
    """Replace the meta tensors that ``modules`` own with whole, initialised tensors on ``device``.

    Args:
        modules: the modules to fill; those without meta tensors are left alone.
        device: where the tensors are made.
        seed: the run's seed, equal on all ranks.
        fqns: each module's FQN in the LightningModule.
        initializers: from `find_initializers`, asked before anything was touched.
        created: the tensors made so far by the id of the meta tensor they replace; shared between calls so that
            tied parameters stay tied.

    Raises:
        MaterializationError: an initializer left a tensor without values.
    """
    for module in modules:
        if module not in initializers:
            continue
        fresh = _replace_meta_tensors(module, device, created)
        if not fresh:
            continue
        derived = derived_seed(seed, fqns[module])
        _initialize([initializers[module]], device, derived)
        missed = _unset(module, fresh)
        reset = _own_reset(module)
        if missed and reset is not None:
            # As when it is built on a real device: its constructor's values, then those of the model around it.
            _initialize([reset, initializers[module]], device, derived)
            missed = _unset(module, fresh)
        if missed:
            raise MaterializationError(
                f"The initialisation of {fqns[module] or '(root)'} ({type(module).__name__}) left "
                f"{', '.join(missed)} without values. A module that is built on the meta device must set each of its "
                "own parameters and buffers, those that are not persistent too, in reset_parameters()."
            )
        for name, meta in fresh.items():
            if isinstance(meta, DTensor):
                _cut_as(module, name, meta)
                created[id(meta)] = (meta, weakref.ref(_own_tensors(module)[name]))


def _initialize(steps: Iterable[Callable[[], object]], device: torch.device, seed: int) -> None:
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        for step in steps:
            step()


def _replace_meta_tensors(module: nn.Module, device: torch.device, created: Created) -> dict[str, Tensor]:
    """Give ``module`` tensors without values on ``device``; returns the meta tensors that were new, by name."""
    fresh: dict[str, Tensor] = {}
    for name, tensor in _own_tensors(module).items():
        if not tensor.is_meta:
            continue
        made = created[id(tensor)][1]() if id(tensor) in created else None
        if made is None:
            made = _unset_like(tensor, device)
            made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            created[id(tensor)] = (tensor, weakref.ref(made))
            fresh[name] = tensor
        # By attribute, because modules such as nn.LSTM keep their parameters in a list of their own as well.
        setattr(module, name, made)
    return fresh


def _cut_as(module: nn.Module, name: str, meta: DTensor) -> None:
    """Cut a whole tensor as its meta tensor was, where the user applied ``fully_shard`` on the meta device."""
    whole = _own_tensors(module)[name]
    cut = distribute_tensor(whole.detach(), meta.device_mesh, meta.placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(cut, meta.requires_grad) if isinstance(meta, nn.Parameter) else cut)


def _unset_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of NaN (of the smallest integer, for integers), which `_is_unset` recognises."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if empty.is_floating_point() or empty.is_complex():
        return empty.fill_(float("nan"))
    return empty.zero_() if empty.dtype == torch.bool else empty.fill_(torch.iinfo(empty.dtype).min)


def _unset(module: nn.Module, names: Iterable[str]) -> list[str]:
    # An initializer may have assigned a new tensor, so the module is read again.
    own = _own_tensors(module)
    return [name for name in names if _is_unset(own[name])]


def _is_unset(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    smallest = torch.iinfo(tensor.dtype).min
    # Zero is the smallest unsigned value and a common one.
    return smallest != 0 and bool((tensor == smallest).any())

"""Refuse modules that are already sharded, and modules and parameters that an engine can't shard or step."""

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torch.optim import Optimizer

from lightning_shard.engines._fsdp2 import units_of
from lightning_shard.engines.dtensor_refusals import BETWEEN_STEPS, ROOTS_UNIT
from lightning_shard.errors import ConfigurationError
from lightning_shard.private_names import require
from lightning_shard.tensors.names import outside_graphs, unwrapped_modules
from lightning_shard.text import listed

require(Tensor, "_backward_hooks _post_accumulate_grad_hooks")


def refuse_sharded(module: nn.Module, strategy: str, *, by_fsdp: bool = True, by_zero: bool = True) -> None:
    """Raise ConfigurationError if FSDP2, ZeRO-3 or a loader has sharded the module."""
    by = "with FSDP2" if by_fsdp and units_of(module) else ""
    # DeepSpeed's mark on a parameter, read without importing DeepSpeed.
    if by_zero and any(hasattr(p, "ds_tensor") for p in module.parameters()):
        by = "by ZeRO-3"
    if by:
        raise ConfigurationError(
            f"{strategy} needs a module with full parameters, but this one was sharded {by}, by an earlier run or in "
            "configure_model. Make it plain with lightning_shard.unshard(module), or build a new one and load the "
            "earlier run's checkpoint with ckpt_path."
        )
    inside = {p for unit in units_of(module) for p in unit.parameters()}
    if found := [n for n, p in module.named_parameters() if isinstance(p, DTensor) and p not in inside]:
        raise ConfigurationError(
            f"{strategy} shards full parameters, but {len(found)} come already sharded as DTensors, {found[0]} first, "
            "as from_pretrained with tp_plan or distributed_config makes them. Load the model without these."
        )


def refuse_kinds(module: nn.Module, strategy: str, *, hooked: bool = False, ignored: Container[Tensor] = ()) -> None:
    """Raise ConfigurationError for all parameters that a sharding engine can't step, except ``ignored`` ones.
    ``hooked``: also those that a module's own hook reads before the engine's hooks gather them.
    """
    inside = dict(module.named_modules())
    sparse = {f"{n}.weight".lstrip(".") for n, m in inside.items() if getattr(m, "sparse", False) is True}
    # With ``max_norm`` forward writes to the weights, which are gathered or cast copies there.
    written = {f"{n}.weight".lstrip(".") for n, m in inside.items() if getattr(m, "max_norm", None) is not None}
    scripted = {f"{n}.{p}" for n, m in inside.items() if isinstance(m, ScriptModule) for p, _ in m.named_parameters()}
    buffers = {name for name, _ in module.named_buffers()}
    kinds: dict[str, Callable[[str, Tensor], bool]] = {
        "complex (use its real view, torch.view_as_real)": lambda n, p: p.is_complex(),
        "with sparse gradients (set sparse=False)": lambda n, p: n in sparse and p.requires_grad,
        "renormalised in forward (clip a copy there in place of max_norm)": lambda n, p: (
            n in written and p.requires_grad
        ),
        "of scripted modules (use the Python module, and compile: true)": lambda n, p: n in scripted,
        "without elements (register it as a buffer)": lambda n, p: not getattr(p, "ds_numel", p.numel()),
        "of torch.nn.utils.spectral_norm (use torch.nn.utils.parametrizations.spectral_norm)": lambda n, p: (
            hooked and f"{n.removesuffix('_orig')}_u" in buffers
        ),
    }
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters():
        is_of = (kind for kind, test in kinds.items() if parameter not in ignored and test(name, parameter))
        if (kind := next(is_of, None)) is not None:
            found.setdefault(kind, []).append(name)
    if found:
        lines = "; ".join(f"{kind}: {listed(names)}" for kind, names in found.items())
        raise ConfigurationError(
            f"{strategy} can't step parameters of these kinds: {lines}. Change them as said, or use shard_ddp in "
            "'32-true'."
        )


BEFORE_SHARDING = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_SHARDS = ("_backward_hooks",)  # FSDP2 calls ``_post_accumulate_grad_hooks`` with reduced gradients.


def refuse_hooks(names: Mapping[Tensor, str], strategy: str, kinds: Iterable[str]) -> None:
    """Raise ConfigurationError for hooks of these ``kinds`` on parameters, which would not run on shards."""
    for kind in kinds:
        if not any(map(attrgetter(kind), names)):  # a loop in C, because it runs in each step
            continue
        hooked = [name for parameter, name in names.items() if getattr(parameter, kind)]
        raise ConfigurationError(
            f"Hooks are registered on the parameters {listed(hooked)}, but {strategy} has shards in their place, which "
            "run none. Change gradients in on_before_optimizer_step by lightning_shard.full_parameters(trainer, "
            'names, kind="gradient", write=True) (examples/guides/contract.md), or register a backward hook on the '
            "module."
        )


def refuse_lists(module: nn.Module, strategy: str) -> None:
    """Raise ConfigurationError for modules' attributes that are lists, tuples or dicts with parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def held(value: Any, inside: frozenset[int] = frozenset()) -> list[str]:
        if isinstance(value, nn.Parameter):
            return [names[value]] if value in names else []
        if type(value) not in (list, tuple, dict) or id(value) in inside:
            return []
        items = value.values() if isinstance(value, dict) else value
        return [name for item in items for name in held(item, inside | {id(value)})]

    for owner, part in module.named_modules():
        # torch updates the lists of recurrent modules.
        for attribute, value in {} if isinstance(part, nn.RNNBase) else vars(part).items():
            # The second attribute is DeepSpeed's, and the third FSDP2Engine's.
            own = attribute in ("_parameters", "_original_parameters", "_shard_state")
            if not own and not isinstance(value, nn.Parameter) and (found := held(value)):
                raise ConfigurationError(
                    f"{f'{owner}.{attribute}'.lstrip('.')} is a {type(value).__name__} that holds the parameters "
                    f"{listed(found)}, but {strategy} replaces parameters and would leave the old ones in it. Use "
                    "nn.ParameterList or nn.ParameterDict, or look them up by their names when they are used."
                )


def refuse_compiled(module: nn.Module, strategy: str) -> None:
    """Raise ConfigurationError for modules in graphs of the user's own ``torch.compile``."""
    outside = set(outside_graphs(module))
    inside = [n for n, m in unwrapped_modules(module) if m not in outside and not isinstance(m, ScriptModule)]
    if inside:
        raise ConfigurationError(
            f"torch.compile makes a graph of {inside[0] or 'the module itself'}, but {strategy} gathers parameters in "
            "hooks of each module, which no graph holds. Use shard_fsdp or stage 2, or leave out torch.compile."
        )


def refuse_new_groups(optimizers: Iterable[Optimizer], strategy: str) -> Callable[[], None]:
    """Make ``add_param_group`` raise ConfigurationError until the returned function is called."""

    def refuse(group: object) -> None:
        raise ConfigurationError(
            f"add_param_group is called in a fit, but {strategy} steps flat partitions, or full parameters at their "
            "owners, of the groups when the fit began. Put all parameters into the optimizer in configure_optimizers, "
            "with a learning rate of 0 at first, or use shard_ddp, or shard_fsdp with an elementwise optimizer."
        )

    closing = ExitStack()
    for own in map(vars, optimizers):
        own["add_param_group"] = refuse
        closing.callback(own.pop, "add_param_group")
    return closing.close


def refuse_second_pass(loss: Tensor) -> Callable[[], None]:
    """Make a second backward pass from ``loss`` raise ConfigurationError until the returned function is called."""
    passes: list[Tensor] = []

    def once(gradient: Tensor) -> None:
        if passes:
            # torch's DDP would not reduce the second one, so ranks would diverge.
            raise ConfigurationError(
                "The module's backward runs two backward passes from one loss, but engines reduce only the first. "
                "Run one from their sum (2 * loss), or use manual optimization with a manual_backward for each."
            )
        passes.append(gradient)

    return loss.register_hook(once).remove


def refuse_double(module: nn.Module, strategy: str, compute: torch.dtype) -> None:
    """Raise ConfigurationError for fp64 parameters that would become fp32 masters, or be rounded to fp32 as frozen ones
    if ``compute`` is fp32.
    """
    double = [(name, p) for name, p in module.named_parameters() if p.dtype == torch.float64]
    if found := [name for name, p in double if p.requires_grad or compute == torch.float32]:
        raise ConfigurationError(
            f"{listed(found)} are fp64, but {strategy} has no wider parameters than fp32. Call .float() on the module, "
            "or use shard_ddp in '32-true', which keeps fp64."
        )


MIXED = "got mixed torch.Tensor and DTensor"

RELEASED = (
    "are out of bounds for storage of size 0",
    "returned an invalid gradient at index 0 - got [0]",
    "The size of tensor a (0) must match",
    "must match the size of tensor b (0)",
    "must match the existing size (0)",
)
"""torch's errors if an operator meets a released parameter."""

_NOT_GATHERED = (MIXED, *RELEASED, "'Tensor' object has no attribute 'ds_status'")
"""torch's and DeepSpeed's errors if an operator meets a parameter's shard, a released parameter, or another tensor in
its place, as by torch.func.functional_call.
"""


@contextmanager
def explain_ungathered(strategy: str) -> Generator[None, None, None]:
    """Replace errors of a step or its backward pass that meets ungathered parameters by a ConfigurationError."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if _DISAGREE in str(error):
            raise different_branches("they gather the parameters of different modules") from error
        if not any(text in str(error) for text in _NOT_GATHERED):
            raise
        raise not_gathered(strategy) from error
    except TypeError as error:
        if "(torch.nn.Parameter or None expected)" not in str(error):
            raise
        raise ConfigurationError(
            f"A forward writes a tensor in the place of a parameter that {strategy} gathers ({error}), such as "
            "torch.nn.utils.prune's if it is applied after the model was set up to train. Apply it in __init__, "
            "setup or configure_model, or use shard_ddp in '32-true'."
        ) from None


_DISAGREE = "Detected a disagreement on list"
"""The error of DeepSpeed's stage 3 if ranks have run different modules."""


class DifferentUse(ConfigurationError):
    """Ranks or steps use different modules or parameters."""


def different_branches(how: str) -> DifferentUse:
    """The error if ranks run different modules in a step."""
    return DifferentUse(
        f"Ranks take different branches: {how}. Sharded parameters are gathered by all ranks together, in one order. "
        "Seed random choices equally (seed_everything), put the branches into one shard unit (units, with shard_fsdp), "
        "run all of them on every rank (generate of transformers: synced_gpus=True), or use shard_ddp with "
        "find_unused_parameters: true in '32-true'."
    )


def other_parameters(how: str) -> DifferentUse:
    """The error of a rank that uses other parameters than before, unknown to other ranks."""
    return DifferentUse(
        f"{how}. Then ranks have to exchange which parameters they use: set find_unused_parameters: true, which "
        "shard_fsdp and shard_ddp have, and ZeRO has not."
    )


def not_gathered(strategy: str) -> ConfigurationError:
    """The error of a step that uses parameters that ``strategy`` has not gathered."""
    return ConfigurationError(
        f"The step uses parameters that {strategy} has not gathered at that time: it gathers a module's parameters for "
        "its own forward and backward pass. For a sum over self.parameters() use the optimizer's weight_decay, or "
        f"compute it in the modules; {ROOTS_UNIT}; take gradients of gradients after the step's other forward passes; "
        f"{BETWEEN_STEPS}; or use shard_deepspeed_stage_2, or shard_ddp in '32-true'."
    )

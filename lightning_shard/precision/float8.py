"""Linear layers whose matrix products are taken in float8, by torchao, the same on every engine that allows it.

A layer keeps its parameters, names and hooks, and gets the class and settings of torchao's ``Float8Linear``. Scales are
dynamic, of the tensors at hand: engines that read the same batches agree, and no state goes into a checkpoint.
"""

import re
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from lightning_shard.arguments import checked_fields
from lightning_shard.errors import PrecisionError

MULTIPLE = 16  # It divides both sizes of a layer: float8 kernels take nothing else (`torch._scaled_mm`).


@checked_fields("float8", error=PrecisionError)
@dataclass(frozen=True, kw_only=True)
class Float8:
    """Linear layers that compute in float8, and their recipe.

    Raises:
        PrecisionError: a pattern that is no regular expression.
    """

    pattern: str = ".*"
    """A regular expression for whole names of ``nn.Linear`` modules in the LightningModule. Subclasses with their own
    forward, sizes that are no multiples of 16, and weights that another module has (a head tied to an embedding) stay
    in bf16. ``(?!.*lm_head).*`` leaves a head out."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """torchao's recipe: one scale per tensor, one per row, or one per row with the weight's gradient in bf16."""

    emulate: bool = False
    """Round to float8 and multiply in fp32: the numbers without the speed, for hardware without float8."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise PrecisionError(f"float8.pattern {self.pattern!r} is no regular expression: {error}.") from error


def check_float8(settings: Float8 | None, device: torch.device, *, launched: bool) -> None:
    """Refuse ``settings`` that can't run on ``device``. The GPU is asked once ``launched``, since a CUDA context keeps
    a notebook from forking processes. PrecisionError: torchao is missing, or the device has no float8.
    """
    if settings is None:
        return
    if find_spec("torchao") is None:
        raise PrecisionError("precision is 'fp8-mixed', but torchao is not installed. Install it: pip install torchao.")
    if settings.emulate:
        return
    found = str(device.type)
    if device.type == "cuda":
        if not launched or (able := torch.cuda.get_device_capability(device)) >= (8, 9):
            return
        found = f"{torch.cuda.get_device_name(device)} of compute capability {able[0]}.{able[1]}"
    raise PrecisionError(
        f"precision is 'fp8-mixed' on {found}, but float8 products need a GPU of compute capability 8.9 or newer (Ada, "
        "Hopper, Blackwell). Use 'bf16-mixed', or float8: {emulate: true} for the same numbers without the speed."
    )


def install_float8(root: nn.Module, settings: Float8, others: Container[nn.Module]) -> Callable[[], None]:
    """Let linear layers of ``settings``, not ``others``, multiply in float8. Returns the undo. PrecisionError: none."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, emulate = Float8LinearConfig.from_recipe_name(settings.recipe), settings.emulate
    # Padding for numbers of tokens that are no multiples of 16.
    config = replace(recipe, emulate=emulate, pad_inner_dim=not emulate)
    sample = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"), config=config)
    own = {name: value for name, value in vars(sample).items() if name not in vars(nn.Linear(1, 1, device="meta"))}
    layers = [layer for layer in _layers(root, settings.pattern) if layer not in others]
    if not layers:
        raise PrecisionError(
            f"precision is 'fp8-mixed', but no nn.Linear matches float8.pattern {settings.pattern!r} whose sizes are "
            f"multiples of {MULTIPLE} and whose weight is its own. Use 'bf16-mixed', or another pattern."
        )

    before = [type(layer) for layer in layers]
    # Subclasses keep their own methods, such as the one that initializes weights.
    made: Any = {cls: type(f"Float8{cls.__name__}", (type(sample), cls), {}) for cls in before}
    for layer in layers:
        layer.__class__ = made[type(layer)]
        vars(layer).update(own)
    return partial(_take_back, list(zip(layers, before, strict=True)), own)


def _layers(root: nn.Module, pattern: str) -> list[nn.Linear]:
    owners = Counter(id(p) for m in root.modules() for p in m.parameters(recurse=False))
    return [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and re.fullmatch(pattern, name)
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        and owners[id(module.weight)] == 1
    ]


def _take_back(layers: list[tuple[nn.Linear, type]], own: dict[str, Any]) -> None:
    for layer, before in layers:
        layer.__class__ = before
        for name in own:
            del vars(layer)[name]


def multiplies_in(module: nn.Module) -> torch.dtype | None:
    """The float8 dtype of ``module``'s weight in products, or None."""
    config = vars(module).get("config") if "linear_mm_config" in vars(module) else None
    return None if config is None else config.cast_config_weight.target_dtype

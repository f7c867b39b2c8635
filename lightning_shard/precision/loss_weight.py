"""Averages of losses over ranks and micro-batches, weighted for example by their numbers of valid tokens.

Engines average gradients over ranks, and Lightning over micro-batches, for any number of tokens in each. With a weight
``w`` of each loss ``l`` (the mean over ``w`` tokens) a step has the gradient of ``sum(w * l) / sum(w)`` over all ranks
and micro-batches. The divisor is known only at the accumulation boundary. So each loss is multiplied by its weight
before backward, and the reduced gradients by ``ranks * micro-batches / sum(w)`` before they are clipped.

In fp16 the product might overflow. Weights are divided by a power of two, the unit, that is no smaller than any weight
of the window. If the unit grows, the gradients so far are divided by the growth.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import ConfigurationError, DataError
from lightning_shard.ranks import Ranks
from lightning_shard.tensors.clipping import multiply_gradients
from lightning_shard.tensors.full import to_host_later

WEIGHT, REDUCTION = "weight", "reduction"  # Keys of ``training_step``'s output, besides "loss".


@dataclass(frozen=True, kw_only=True)
class WeightKey:
    """The entry of a batch that gives the weight of its loss."""

    name: str  # A key of a mapping, the position in a tuple or list, or an attribute.
    ignored: float | None = None  # Count the elements that differ from this number. None: sum all elements.

    @staticmethod
    def parse(text: str) -> "WeightKey":
        """The key of ``"mask"``, ``"1"`` or ``"labels != -100"``. ConfigurationError: another form."""
        name, differs, number = (part.strip() for part in text.partition("!="))
        try:
            ignored = float(number) if differs else None
        except ValueError:
            name = ""
        if not name:
            raise ConfigurationError(
                f"loss_weight_key is {text!r}, but must name an entry of the batch whose sum is the weight, such as "
                "'attention_mask' or '2', or count an entry's elements that differ from a number: 'labels != -100'."
            )
        return WeightKey(name=name, ignored=ignored)

    def weight_of(self, batch: Any) -> Tensor:
        """The weight of a batch, a scalar on the entry's device. DataError: no such entry, or no number."""
        try:
            entry = torch.as_tensor(self._entry(batch))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
            keys = f" with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise DataError(
                f"loss_weight_key names {self.name!r}, but the batch ({type(batch).__name__}{keys}) has none."
            ) from None
        return (entry != self.ignored).sum() if self.ignored is not None else entry.sum()

    def _entry(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) or not hasattr(batch, self.name):  # A dict has attributes too: values, items.
            return batch[int(self.name) if isinstance(batch, Sequence) else self.name]
        return getattr(batch, self.name)


class LossWeights:
    """The weights of the losses of an optimizer step. All ranks call each method at the same point of a step."""

    def __init__(self, key: str | None, *, ranks: int, device: torch.device, scaled: bool) -> None:
        """``key`` is for `WeightKey.parse`. ``scaled`` says that the loss is multiplied by a loss scale as well."""
        self._key = None if key is None else WeightKey.parse(key)
        self._ranks, self._device, self._scaled = ranks, device, scaled
        self.given: bool | None = None
        """Whether the losses have weights, the same on every rank. None before the first."""
        self._weight: Tensor | None = None  # of the loss whose backward comes next
        self._is_sum = False
        self._unit = 1.0
        self._sums = self._zeros()
        self._total: Callable[[], Tensor] | None = None  # the weights' sum over all ranks, on the host

    def _zeros(self) -> Tensor:
        # fp64: sums of tokens are exact, also beyond 2**24.
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def take_weight(self, output: Any, batch: Any) -> None:
        """Take the weight of a step's loss. DataError: it is missing in some steps or on some ranks, or no weight."""
        if output is None:
            return  # no loss, and no backward
        weight = output.get(WEIGHT) if isinstance(output, Mapping) else None
        if weight is None and self._key is not None:
            weight = self._key.weight_of(batch)
        if self.given is None:
            answers = Ranks.of().gather(weight is not None)
            if len(set(answers)) > 1:
                without = ", ".join(str(rank) for rank, answer in enumerate(answers) if not answer)
                raise DataError(
                    f"training_step gives a weight with its loss on some ranks, but none on ranks {without}. Return "
                    "the weight on every rank, 0 where nothing counts."
                )
            self.given = weight is not None
        if (weight is not None) != self.given:
            raise DataError("training_step gives a weight with some losses alone. Return it with every loss, or never.")
        if weight is None:
            return
        reduction = output.get(REDUCTION, "mean") if isinstance(output, Mapping) else "mean"
        if reduction not in ("mean", "sum"):
            raise DataError(f"training_step returns reduction {reduction!r}, but it must be 'mean' or 'sum'.")
        self._is_sum = reduction == "sum"
        self._weight = self._scalar(weight)

    def _scalar(self, weight: Any) -> Tensor:
        is_number = isinstance(weight, Tensor | Number)
        if not is_number or (tensor := torch.as_tensor(weight)).numel() != 1 or tensor.is_complex():
            raise DataError(
                f"training_step returns a weight of {weight!r}, but must return one number with its loss: the count of "
                "tokens or samples that the loss is the mean of."
            )
        # A check of a tensor on the device would wait for it.
        if tensor.device.type == "cpu" and not (math.isfinite(value := float(tensor)) and value >= 0):
            raise DataError(f"training_step returns a weight of {value}, but it must be 0 or more, and finite.")
        return tensor.detach().reshape(()).to(self._device, torch.float64, non_blocking=True)

    @torch.no_grad()
    def _grow_unit(self, weight: Tensor, waiting: Callable[[], Iterable[Tensor]]) -> None:
        largest = weight.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        needed = 2.0 ** math.ceil(math.log2(max(1.0, float(largest))))
        if needed > self._unit:
            multiply_gradients(waiting(), torch.tensor(self._unit / needed, dtype=torch.float32))
            self._unit = needed

    def scale_loss(self, loss: Tensor, *, ends: bool, waiting: Callable[[], Iterable[Tensor]]) -> Tensor:
        """``loss``, a mean over its weight or a sum, times its weight for backward. ``ends`` says that the backward
        ends an accumulation. ``waiting`` gives earlier micro-batches' gradients.
        """
        weight, self._weight = self._weight, None
        assert weight is not None, "each loss was taken"
        if self._scaled:
            self._grow_unit(weight, waiting)
        # The mean of nothing is often NaN.
        counted = torch.where(weight > 0, loss, torch.zeros_like(loss))
        with torch.no_grad():
            total = counted.double() * (1.0 if self._is_sum else weight)
            self._sums += torch.stack((weight, total.to(self._device)))
        if ends:
            # It is read after backward was launched, so that reading does not wait for backward.
            self._total = self._reduce_sums()
        factor = 1.0 / self._unit if self._is_sum else (weight / self._unit).to(torch.float32)
        return counted * factor

    def _reduce_sums(self) -> Callable[[], Tensor]:
        dist.all_reduce(self._sums)
        return to_host_later(self._sums[0])

    @torch.no_grad()
    def average_gradients(self, gradients: Iterable[Tensor], *, micro_batches: int) -> Tensor | None:
        """At the accumulation boundary, divide this rank's reduced ``gradients`` by the weights' sum, in place. Returns
        the weighted mean loss, a scalar on the device, equal on all ranks. None: all weights are 0, skip the step.
        """
        total, sums, unit = self._total or self._reduce_sums(), self._sums, self._unit
        self._total, self._sums, self._unit = None, self._zeros(), 1.0
        if total() == 0:
            return None
        multiply_gradients(gradients, (self._ranks * micro_batches * unit / sums[0]).to(torch.float32))
        return (micro_batches * sums[1] / sums[0]).to(torch.float32)

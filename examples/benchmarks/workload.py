"""The task of every contestant of a benchmark: one model, one stream of batches, one optimizer, one loss."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler

from examples.benchmarks.llama import SIZES, Llama, Size
from examples.gpt import Rotary
from examples.python_corpus import Windows, load, standard_library
from lightning_shard import devices
from lightning_shard.meters.flops import count_flops

Batch = tuple[Tensor, Tensor]

DEVICES = sorted({"cpu", "cuda", *devices.types()})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its data."""

    size: Size = SIZES["5M"]
    seq_len: int = 128
    batch_size: int = 4
    """Sequences in a batch of one process."""
    precision: str = "32-true"
    """"32-true" or "bf16-mixed": masters, optimizer state and reduction are fp32 in both."""
    device: str = "cpu"
    processes: int = 2
    checkpointing: str | None = None
    """"units" runs each block again in backward, "selective" all of it but products and attention, None nothing."""
    compile: bool = False
    """Blocks, and the loss, are compiled."""
    weights: str | None = None
    """A file of the model's values, which all processes map into their memory. None: each makes them on the host."""
    foreach: bool | None = None
    """Whether the optimizer steps lists of tensors. None: torch's choice, which is not on CPUs."""

    @property
    def tokens(self) -> int:
        """Tokens in a batch of one process."""
        return self.seq_len * self.batch_size

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of products."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float32

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes, as FSDP2 takes them."""
        if self.precision == "32-true":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that make a `Workload`."""
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--processes", type=int, help="default: 2 on CPUs, all GPUs")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], help="default: 32-true on CPUs, bf16-mixed")
    parser.add_argument("--size", choices=list(SIZES), help="parameters of the model (default: 5M or 25M on CPUs, 1B)")
    parser.add_argument("--seq-len", type=int, help="tokens in a sequence (default: 64 to 256 on CPUs, 4096)")
    parser.add_argument("--batch-size", type=int, help="sequences in a batch of one process (default: 4 on CPUs, 1)")
    parser.add_argument(
        "--checkpointing",
        choices=["units", "selective"],
        help="of activations: whole blocks, or all of them but products",
    )
    parser.add_argument("--compile", action="store_true", help="blocks and the loss, with torch.compile")


def workload_of(options: argparse.Namespace, *, size: str = "5M", seq_len: int = 256) -> Workload:
    """The workload of the options. ``size`` and ``seq_len``: defaults on CPUs."""
    on_gpu = options.device != "cpu"

    def given(name: str, cpu: object, gpu: object) -> object:
        value = getattr(options, name)
        return value if value is not None else gpu if on_gpu else cpu

    return Workload(
        size=SIZES[given("size", size, "1B")],
        seq_len=given("seq_len", seq_len, 4096),
        batch_size=given("batch_size", 4, 1),
        precision=given("precision", "32-true", "bf16-mixed"),
        device=options.device,
        processes=given("processes", 2, devices.visible()),
        checkpointing=options.checkpointing,
        compile=options.compile,
    )


def parameters_of(work: Workload) -> int:
    """How many numbers the model has."""
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(work.size, work.seq_len).parameters())


def describe(work: Workload) -> str:
    """One line for the head of a table."""
    return (
        f"{parameters_of(work) / 1e6:.1f} M parameters, {work.processes} processes on {work.device}, "
        f"{work.batch_size} x {work.seq_len} tokens each, {work.precision}"
        + (f", {work.checkpointing} checkpointed" if work.checkpointing else "")
        + (", compiled" if work.compile else "")
    )


def model_flops(work: Workload) -> int:
    """Model FLOPs of one process' step: forward and backward, attention counted causal."""
    with torch.device("meta"):
        model = Llama(work.size, work.seq_len)
        tokens = torch.zeros(work.batch_size, work.seq_len, dtype=torch.int64)
    return count_flops(lambda model, tokens: _loss(model(tokens), tokens), model, tokens).total


def build_model(work: Workload, *, plain: bool = False) -> Llama:
    """The model, on the host, with the same values in every process and contestant.

    ``plain``: the engine checkpoints and compiles, by its options. Else this function does.
    """
    torch.manual_seed(1)
    with torch.device("meta" if work.weights else "cpu"):
        model = Llama(work.size, work.seq_len)
    if work.weights:
        for module in model.modules():
            if isinstance(module, Rotary):  # its tables are in no state dict
                module.to_empty(device="cpu").reset_parameters()
        model.load_state_dict(torch.load(work.weights, mmap=True, weights_only=True), assign=True)
    for block in [] if plain else model.blocks:
        if work.checkpointing is not None:
            contexts = {"context_fn": _contexts} if work.checkpointing == "selective" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)
        if work.compile:
            block.forward = torch.compile(block.forward)
    return model


def with_weights(work: Workload, folder: Path) -> Workload:
    """``work`` with its values in a file of ``folder``, which is written when they are first asked for: a model of
    billions of parameters takes minutes to fill, and each process and contestant would have it whole. Without room for
    the file it is ``work``.
    """
    file = folder / f"{work.size.layers}x{work.size.width}.pt"
    if not file.exists():
        if shutil.disk_usage(folder).free < 5 * parameters_of(work):
            return work
        torch.save(build_model(Workload(size=work.size, seq_len=work.seq_len)).state_dict(), file)
    return replace(work, weights=str(file))


def _contexts() -> Any:
    aten = torch.ops.aten
    attention = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    kept = [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in attention]
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default, *kept])


def build_optimizer(work: Workload, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW, on GPUs its fused form."""
    fused = True if work.device == "cuda" else None
    settings: dict[str, Any] = {"fused": fused, "foreach": work.foreach}
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **settings)


def build_loader(work: Workload, rank: int) -> DataLoader[Batch]:
    """Inputs and targets, int64 (batch_size, seq_len) each: this rank's share, in the same order for everyone."""
    text, _ = load(standard_library(), 0.05, None)
    once = Windows(text, work.seq_len)
    # Long ones several times over, so that no run gets to an epoch's end.
    windows = ConcatDataset([once] * math.ceil(20_000 / len(once)))
    return DataLoader(
        windows,
        work.batch_size,
        sampler=DistributedSampler(windows, work.processes, rank, seed=1, drop_last=True),
        drop_last=True,
        pin_memory=work.device != "cpu",
    )


def stream(work: Workload, rank: int, device: torch.device) -> Iterator[Batch]:
    """The batches of `build_loader`, on the device."""
    loader = build_loader(work, rank)
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for inputs, targets in loader:
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def loss_of(work: Workload, logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per token, in fp32 whatever the compute dtype."""
    return (_compiled_loss() if work.compile else _loss)(logits, targets)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@cache
def _compiled_loss() -> Any:
    return torch.compile(_loss)

"""Runs that others have published, with their measurements and the source of each.

Constants of the planner's times may be fitted on the first half, ``fitted``. The other half judges it. No constant of
its memory was fitted on either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from examples.benchmarks.published_models import Llama, OfTransformers
from lightning_shard.engines.memory_model import DeepSpeedFacts, EngineFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.planning.traffic import Nodes
from lightning_shard.precision.loss_scale import LossScaling
from lightning_shard.precision.policy import PrecisionPolicy

fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
MIXED = PrecisionPolicy(compute=bf16, master=fp32, reduce=fp32, accumulate=fp32)
MIXED_REDUCED = PrecisionPolicy(compute=bf16, master=fp32, reduce=bf16, accumulate=fp32)
FULL = PrecisionPolicy(compute=fp32, master=fp32, reduce=fp32, accumulate=fp32)
HALF = PrecisionPolicy(compute=fp16, master=fp32, reduce=fp16, accumulate=fp32, loss_scale=LossScaling())
AUTOCAST = PrecisionPolicy(
    compute=fp32, master=fp32, reduce=fp32, accumulate=fp32, autocast=fp16, loss_scale=LossScaling()
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a published table."""

    name: str
    source: str
    half: str  # "fitted" or "judged".
    model: Callable[[], nn.Module]
    engine: EngineFacts
    policy: PrecisionPolicy = MIXED
    batch: int = 1  # Samples of a device and micro-batch.
    micro_batches: int = 1
    length: int  # Tokens of a sample.
    units: str | tuple[str, ...] = "auto"
    unit_rules: Mapping[int, Any] = field(default_factory=dict)  # ``reshard_after_forward`` of units, by index.
    reserved: float | None = None  # GiB that torch's allocator had reserved at most.
    tensors: float | None = None  # GiB of tensors at most.
    expandable: bool = True  # Whether segments were.
    largest: int | None = None  # The largest batch that ran in the device's ``memory``.
    memory: float | None = None  # GiB of the device, in which the run had to fit.
    tokens: float | None = None  # Per second and device.
    device: str = "H100"
    bandwidth: float | None = None  # TB/s of its memory, if it is not the data sheet's.
    attention: float = 1.0  # Time of its attention relative to FlashAttention-2.
    nodes: Nodes
    between: float | None = None  # Bytes per second of a node's links to others. None: as most nodes of eight.
    compiled: bool = False
    whole_units: bool = False  # Whether full units are on the device at its start, before they are sharded.
    why: str = ""  # Why the plan misses it, if it does.

    @property
    def series(self) -> str:
        """The model: runs of one model and length can be compared."""
        return self.name.partition(",")[0]


LLAMA_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256}
LLAMA_7B = {"layers": 32, "width": 4096, "heads": 32, "hidden": 11008, "vocabulary": 32000}

_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_COMPILED = "blocks are compiled: fused kernels save less than operators run one by one"
_FP8 = "float8 products are planned as bf16"
NODE = Nodes(nodes=1, devices=8)


_BANDWIDTH = 2.4  # Of the Grand Teton's H100 with 96 GB of HBM2e, as the first of these sources has it.


def _titan(
    name: str, reserved: float, *, half: str, source: str = _TITAN, batch: int = 1, nodes: Nodes = NODE, **other: Any
) -> Published:
    """Llama 3 8B under FSDP2, the last block kept gathered, products saved but every second."""
    model = {"length": 8192, "recompute": "op", **LLAMA_8B, **other.pop("model", {})}
    engine = FSDPFacts(replicate=1, shard=nodes.ranks, reshard_after_forward=other.pop("reshard", True))
    why = other.pop("why", _COMPILED if other.get("compiled") else "")
    return Published(
        name=f"Llama 3 8B, {name}",
        source=source,
        half=half,
        model=partial(Llama, **model),
        engine=engine,
        batch=batch,
        length=model["length"],
        unit_rules=other.pop("unit_rules", {-1: False}),
        reserved=reserved,
        bandwidth=_BANDWIDTH,
        nodes=nodes,
        why=why,
        **other,
    )


def _llama_7b(name: str, recompute: str, reserved: float, *, half: str, batch: int = 8, **other: Any) -> Published:
    model = partial(Llama, length=2048, recompute=recompute, full_logits=True, **LLAMA_7B)
    return Published(
        name=f"Llama 7B, {name}",
        source="torchtitan, pull request 165 (commit 83c879f)",
        half=half,
        model=model,
        engine=FSDPFacts(replicate=1, shard=8),
        batch=batch,
        length=2048,
        unit_rules={-1: False},
        reserved=reserved,
        bandwidth=_BANDWIDTH,
        expandable=False,
        nodes=NODE,
        why=_COMPILED if other.get("compiled") else "",
        **other,
    )


_RESHARD = "torchtitan, pull request 822 (commit 5940dde)"
FAR = Nodes(nodes=16, devices=8)

TORCHTITAN = (
    _titan("8 GPUs, batch 2", 82.4, half="judged", batch=2, tokens=5762),
    _titan("8 GPUs, batch 2, compiled", 77.0, half="fitted", batch=2, tokens=6667, compiled=True),
    _titan(
        "8 GPUs, batch 2, compiled, float8", 76.8, half="judged", batch=2, compiled=True, why=f"{_COMPILED}; {_FP8}"
    ),
    _titan("128 GPUs, batch 2", 67.0, half="fitted", batch=2, nodes=FAR, tokens=5605),
    _titan("128 GPUs, batch 2, compiled", 62.0, half="judged", batch=2, nodes=FAR, tokens=6514, compiled=True),
    _titan(
        "128 GPUs, batch 2, compiled, float8",
        61.8,
        half="fitted",
        batch=2,
        nodes=FAR,
        compiled=True,
        why=f"{_COMPILED}; {_FP8}",
    ),
    _titan(
        "8 GPUs, 32,768 tokens, recomputed, compiled, float8",
        83.9,
        half="judged",
        model={"length": 32768, "recompute": "full"},
        compiled=True,
        why=f"{_COMPILED}; {_FP8}",
    ),
    _titan("8 GPUs, batch 1", 49.59, half="judged", source=_RESHARD, tokens=5605),
    _titan("8 GPUs, batch 1, always resharded", 49.41, half="fitted", source=_RESHARD, unit_rules={}, tokens=5600),
    _titan(
        "8 GPUs, batch 1, never resharded",
        62.18,
        half="judged",
        source=_RESHARD,
        reshard=False,
        unit_rules={},
        tokens=5790,
    ),
    _titan(
        "8 GPUs, batch 1, loss in 8 chunks",
        42.26,
        half="judged",
        source="torchtitan, pull request 996 (commit e23bb70)",
        model={"chunks": 8},
        tokens=5953,
    ),
    _titan(
        "8 GPUs, batch 1, compiled",
        47.65,
        half="fitted",
        source="torchtitan, pull request 808 (commit 069bae2)",
        compiled=True,
    ),
    _llama_7b("recomputed", "full", 0.3264 * 95.0396, half="judged", tensors=0.2392 * 95.0396, tokens=6200),
    _llama_7b("every second product", "op", 0.6251 * 95.0396, half="fitted", tensors=0.5213 * 95.0396, tokens=6700),
    _llama_7b("recomputed, compiled", "full", 28.90, half="fitted", compiled=True, tokens=7350),
    _llama_7b("every second product, compiled", "op", 53.83, half="judged", compiled=True, tokens=8250),
    _llama_7b("every second product, batch 16, compiled", "op", 88.23, half="fitted", batch=16, compiled=True),
    _llama_7b("nothing recomputed, compiled", "none", 90.28, half="judged", compiled=True, tokens=9200),
)

_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
_DEBERTA = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "position_biased_input": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "type_vocab_size": 0,
    "vocab_size": 128100,
    "num_labels": 2,
}
_BLENDERBOT = {
    "vocab_size": 8008,
    "d_model": 1280,
    "encoder_layers": 2,
    "decoder_layers": 12,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_position_embeddings": 128,
    "scale_embedding": True,
}
_GPT_LARGE = {"n_embd": 1280, "n_layer": 36, "n_head": 20}
_GPT_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
QWEN = partial(OfTransformers, "Qwen2ForCausalLM", "Qwen2Config", attention="sdpa", **_QWEN)
DEBERTA = partial(OfTransformers, "DebertaV2ForSequenceClassification", "DebertaV2Config", **_DEBERTA)
BLENDERBOT = partial(OfTransformers, "BlenderbotForConditionalGeneration", "BlenderbotConfig", **_BLENDERBOT)
GPT_LARGE = partial(OfTransformers, "GPT2LMHeadModel", "GPT2Config", **_GPT_LARGE)
GPT_XL = partial(OfTransformers, "GPT2LMHeadModel", "GPT2Config", **_GPT_XL)

_FSDP_POST = "Hugging Face, blog/pytorch-fsdp.md"
_DS_POST = "Hugging Face, blog/accelerate-deepspeed.md"
_LENGTH = "not known: the block_size of 12 in the post gives no such limit, and 128 tokens are planned"
_PADDED = "sequences were padded to the longest of their batch, and are planned with all 128 tokens"
_ONE = "one process, on which FSDP1 keeps flat parameters and their gradients full"
_OLD = "not known: DeepSpeed of June 2022, and 0.19 is planned"
_TRIED = "a round number was tried"
_TITAN_RTX = 23.65  # GiB, as the error in the first of these posts says.


def _largest(
    name: str, model: Any, engine: EngineFacts, largest: int, *, half: str, length: int = 128, **other: Any
) -> Published:
    """The largest batch on Titan RTX of 24 GB."""
    return Published(
        name=name,
        source=other.pop("source", _FSDP_POST),
        half=half,
        model=model,
        engine=engine,
        largest=largest,
        length=length,
        memory=_TITAN_RTX,
        expandable=False,
        device="Titan RTX",
        nodes=Nodes(nodes=1, devices=engine.ranks),
        **other,
    )


def _post(name: str, model: Any, engine: EngineFacts, largest: int, *, half: str, **other: Any) -> Published:
    return _largest(name, model, engine, largest, half=half, source=_DS_POST, **{"policy": HALF, **other})


def _zero_2(*, overlap_comm: bool = False, bucket: int = 5 * 10**8) -> DeepSpeedFacts:
    return DeepSpeedFacts(ranks=2, stage=2, accumulate=fp16, overlap_comm=overlap_comm, reduce_bucket_size=bucket)


def _fsdp(ranks: int = 2, **other: Any) -> FSDPFacts:
    return FSDPFacts(replicate=1, shard=ranks, **other)


def _offloaded(ranks: int, width: int) -> DeepSpeedFacts:
    """ZeRO-3 with Accelerate's "auto" for a model of this width."""
    return DeepSpeedFacts(
        ranks=ranks,
        stage=3,
        accumulate=fp16,
        optimizer_device="cpu",
        param_device="cpu",
        overlap_comm=True,
        reduce_bucket_size=width**2,
        prefetch_bucket_size=int(0.9 * width**2),
        param_persistence_threshold=10 * width,
    )


HUGGING_FACE = (
    Published(
        name="Qwen 2.5 1.5B, FSDP2, batch 2",
        source="Hugging Face, accelerate/benchmarks/fsdp2 (read off its pictures)",
        half="judged",
        model=QWEN,
        engine=_fsdp(8),
        policy=MIXED_REDUCED,
        batch=2,
        length=128,
        units=("Qwen2DecoderLayer",),
        reserved=7050 / 1024,
        tensors=4350 / 1024,
        expandable=False,
        whole_units=True,
        nodes=NODE,
    ),
    _post("DeBERTa XL, DDP, autocast", DEBERTA, TorchDDPFacts(ranks=2), 8, half="judged", policy=AUTOCAST, why=_PADDED),
    _post("DeBERTa XL, ZeRO-2", DEBERTA, _zero_2(), 40, half="fitted", why=_PADDED),
    _post(
        "Blenderbot 400M, DDP, autocast",
        BLENDERBOT,
        TorchDDPFacts(ranks=2),
        100,
        half="fitted",
        policy=AUTOCAST,
        why=_TRIED,
    ),
    _post("Blenderbot 400M, ZeRO-2", BLENDERBOT, _zero_2(overlap_comm=True, bucket=2 * 10**8), 200, half="judged"),
    _post("GPT XL, ZeRO-3 offloaded, 1 GPU", GPT_XL, _offloaded(1, 1600), 16, half="judged", why=_OLD),
    _largest("GPT-2 large, DDP", GPT_LARGE, TorchDDPFacts(ranks=2), 7, half="fitted", policy=FULL, why=_LENGTH),
    _largest(
        "GPT-2 large, DDP, autocast", GPT_LARGE, TorchDDPFacts(ranks=2), 7, half="judged", policy=AUTOCAST, why=_LENGTH
    ),
    _largest("GPT-2 large, grad-op", GPT_LARGE, _fsdp(reshard_after_forward=False), 11, half="fitted", policy=FULL),
    _largest("GPT-2 large, FSDP", GPT_LARGE, _fsdp(), 15, half="judged", policy=FULL),
    _largest("GPT-2 large, FSDP offloaded", GPT_LARGE, _fsdp(cpu_offload=True), 22, half="judged", policy=FULL),
    _largest("GPT-2 XL, FSDP", GPT_XL, _fsdp(), 5, half="fitted", policy=FULL, why=_LENGTH),
    _largest(
        "GPT-2 XL, FSDP offloaded, 1 GPU", GPT_XL, _fsdp(1, cpu_offload=True), 10, half="judged", policy=FULL, why=_ONE
    ),
    _largest("GPT-2 XL, FSDP offloaded", GPT_XL, _fsdp(cpu_offload=True), 14, half="fitted", policy=FULL),
)
RUNS = (*TORCHTITAN, *HUGGING_FACE)

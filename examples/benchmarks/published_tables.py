"""Published tables of throughput: fms-fsdp's, llm-foundry's, and torchtitan's on A100, row by row.

A table's rows alternate, in the order in which they are published: the first is of the half that constants of the
planner may be fitted on, the second of the half by which it is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from examples.benchmarks.published_models import MPT, Llama
from examples.benchmarks.published_runs import LLAMA_7B, LLAMA_8B, MIXED, MIXED_REDUCED, Published
from lightning_shard.engines.memory_model import FSDPFacts
from lightning_shard.planning.traffic import Nodes

HALVES = ("fitted", "judged")
_GIB = {"H100": 79.1, "A100": 79.1, "A100 40GB": 39.4}
"""Of a device, as its driver shows them."""

_FMS = "fms-fsdp, README.md (commit 5a296af)"
_LLAMA_2: Mapping[str, Mapping[str, Any]] = {
    "7b": LLAMA_7B,
    "13b": {"layers": 40, "width": 5120, "heads": 40, "hidden": 13824, "vocabulary": 32000},
    "34b": {"layers": 48, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 22016, "vocabulary": 32000},
    "70b": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocabulary": 32000},
}
_COMPUTED_AGAIN = {"13b": 3 / 8, "34b": 3 / 4, "70b": 3 / 4}
"""The share of blocks under "Selective AC", which is not published: the excess of A100's HFU over the FLOPs without it,
counted as there (torch's FLOP counter, attention not causal): 0.38, 0.78 and 0.75. On H100 it would be 0.17, 0.56 and
0.48, with which 70B needs twice the memory. The README has "the exact same scripts and configurations"."""


def _fms_fsdp() -> Iterator[Published]:
    """Llama 2, 4,096 tokens, 2 samples a device, compiled, HSDP for 7B and FSDP else (``docs/configurations.md``)."""
    tokens = {"7b": (4550, 9600), "13b": (2150, 4850), "34b": (820, 1830), "70b": (410, 890)}
    clusters = (("A100", Nodes(nodes=16, devices=8), 50e9), ("H100", Nodes(nodes=12, devices=8), 100e9))
    for index, (size, published) in enumerate(tokens.items()):
        for (device, nodes, between), rate in zip(clusters, published, strict=True):
            again = _COMPUTED_AGAIN.get(size, 0.0)
            recompute = {"recompute": "full", "share": again} if again else {}
            hybrid = FSDPFacts(replicate=nodes.nodes, shard=8)
            yield Published(
                name=f"Llama 2 {size}, {nodes.ranks} {device}",
                source=_FMS,
                half=HALVES[index % 2],
                model=partial(Llama, length=4096, **_LLAMA_2[size], **recompute),
                engine=hybrid if size == "7b" else FSDPFacts(replicate=1, shard=nodes.ranks),
                policy=MIXED_REDUCED,
                batch=2,
                length=4096,
                tokens=rate,
                device=device,
                memory=_GIB[device],
                nodes=nodes,
                between=between,
                compiled=True,
            )


_MPT = {  # Layers, width, heads: scripts/train/yamls/pretrain.
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_LLM_FOUNDRY = {
    # Model: tokens of a sample, GPUs, samples of a micro-batch, micro-batches, tokens per second and GPU, and flags:
    # r, blocks are recomputed, g, SHARD_GRAD_OP, p, PURE, gradients are reduced in bf16.
    "H100": """
        70b: 2048 512 8 1 1007 r, 2048 256 8 1 1035 r, 2048 128 8 1 1058 r
        30b: 2048 512 8 1 2115 r, 2048 256 8 1 2148 r, 2048 128 8 1 2199 r
        13b: 2048 512 16 1 4952 r, 2048 256 16 1 4989 r, 2048 128 16 1 5080 r
        7b: 2048 512 6 1 9670, 2048 256 6 1 10119, 2048 128 6 1 10475
        3b: 2048 512 8 1 21664 g, 2048 256 8 1 22772 g, 2048 128 8 1 23422 g
        1b: 2048 512 12 1 39837 g, 2048 256 12 1 42555 g, 2048 128 12 1 44123 g
        70b: 2048 64 8 4 1039 r, 2048 32 2 16 882 r
        30b: 8192 8 1 21 1384 r, 4096 8 1 21 1802 r, 2048 32 14 3 2308 r, 2048 16 10 3 2263 r, 2048 8 3 21 2002 r
        30b: 1024 8 6 21 2084 r
        13b: 32768 8 1 3 1976 r, 16384 8 3 3 2985 r, 4096 8 10 3 4717 r, 2048 64 2 1 4800, 2048 32 2 1 4811
        13b: 2048 16 2 1 4767, 2048 8 2 1 4792, 1024 8 40 3 5502 r
        7b: 65536 8 1 2 1956 r, 32768 8 2 2 3318 r, 8192 8 8 2 6935 r, 4096 8 16 2 8611 r, 2048 8 6 1 10643
        7b: 1024 8 64 2 10203 r
        3b: 65536 8 1 2 3262 r, 32768 8 3 6 5873 r, 16384 8 1 6 11152, 8192 8 3 6 16578, 4096 8 5 6 20964
        3b: 2048 64 6 3 22525, 2048 32 6 3 23021, 2048 16 10 3 24142, 1024 8 20 6 27046, 512 8 40 6 27965
        1b: 65536 8 1 2 5506 r, 32768 8 1 4 12025, 16384 8 2 4 19649, 8192 8 3 4 29157, 4096 8 7 4 38535
        1b: 2048 64 20 1 44402, 2048 32 20 1 45130, 2048 16 20 1 46037, 2048 8 14 1 45455, 1024 8 18 4 48910
        1b: 512 8 56 4 52275
        760m: 32768 8 1 2 16291, 16384 8 3 2 27815, 8192 8 6 2 41825, 4096 8 12 2 55459, 2048 32 24 1 67971
        760m: 2048 16 24 1 68551, 2048 8 24 2 63147, 1024 8 48 2 78581, 512 8 96 2 83749
    """,
    "H100, fp8": """
        3b: 32768 8 3 6 5856 r, 8192 8 3 6 19146, 2048 8 10 6 30586, 512 8 40 6 36527
        1b: 32768 8 1 4 12580, 8192 8 2 4 32010, 512 8 56 4 70315
    """,
    "A100": """
        70b: 2048 64 8 4 410 rp, 2048 32 2 16 373 rp
        30b: 8192 8 1 21 574 r, 4096 8 1 21 814 r, 2048 8 3 21 916 r, 1024 8 6 21 946 r, 512 8 12 21 967 r
        13b: 32768 8 1 3 1016 r, 16384 8 3 3 1431 r, 8192 8 5 3 1795 r, 4096 8 10 3 2060 r, 2048 8 2 3 2262
        13b: 1024 8 40 3 2330 r
        7b: 65536 8 1 2 1013 r, 32768 8 2 2 1672 r, 16384 8 4 2 2453 r, 8192 8 8 2 3206 r, 4096 8 16 2 3684 r
        7b: 2048 8 6 2 4641, 1024 8 64 2 4357 r
        3b: 65536 8 1 2 1767 r, 32768 8 3 6 3029 r, 16384 8 1 6 5529, 8192 8 3 6 7695, 4096 8 5 6 9457
        3b: 2048 8 10 2 10811, 1024 8 20 6 11580, 512 8 40 6 12127
        1b: 65536 8 1 2 3044 r, 32768 8 1 4 6275, 16384 8 2 4 9956, 8192 8 3 4 13814, 4096 8 7 4 17807
        1b: 2048 8 14 4 20513, 1024 8 18 4 22112, 512 8 56 4 23148
        760m: 65536 8 1 2 4143 r, 32768 8 1 2 8802, 16384 8 3 2 14274, 8192 8 6 2 20933, 4096 8 12 2 27351
        760m: 2048 8 24 2 32434, 1024 8 48 2 29765, 512 8 96 2 29446
        350m: 65536 8 1 2 7524, 32768 8 2 2 13652, 16384 8 4 2 23559, 8192 8 8 2 36569, 4096 8 16 2 49555
        350m: 2048 8 32 2 58782, 1024 8 64 2 64813, 512 8 128 2 69330
        125m: 65536 8 1 2 20368, 32768 8 2 2 36407, 16384 8 4 2 60040, 8192 8 8 2 90392, 4096 8 16 2 118396
        125m: 2048 8 40 2 142830, 2048 8 32 2 141737, 1024 8 64 2 156468, 512 8 128 2 165681
    """,
    "A100 40GB": """
        70b: 2048 128 4 1 376 rp, 2048 64 2 1 276 rp
        30b: 2048 128 6 1 865 rp, 2048 32 4 1 857 rp
        13b: 8192 8 1 16 1407 rp, 4096 8 2 16 1603 rp, 2048 128 16 1 1972 rp, 2048 64 16 1 1976 rp
        13b: 2048 32 14 1 1998 rp, 2048 16 10 1 1993 rp, 2048 8 4 16 1668 rp, 1024 8 8 16 1727 rp, 512 8 16 16 1763 rp
        7b: 16384 8 1 4 2249 rp, 8192 8 3 4 2887 rp, 4096 8 6 4 3366 rp, 2048 128 18 1 3623 rp, 2048 64 18 1 3665 rp
        7b: 2048 32 18 1 3725 rp, 2048 16 16 1 3645 rp, 2048 8 12 4 3679 rp, 1024 8 24 4 3854 rp, 512 8 48 4 3895 rp
        3b: 32768 8 1 4 2955 rp, 16384 8 2 8 4465 rp, 8192 8 1 8 7149 p, 4096 8 2 8 8777 p, 2048 128 6 1 9538 p
        3b: 2048 64 6 1 9736 p, 2048 32 6 1 9914 p, 2048 16 5 1 9750 p, 2048 8 5 8 10065 p, 1024 8 10 8 10731 p
        3b: 512 8 20 8 11324 p
        1b: 32768 8 1 4 5095 rp, 16384 8 1 8 9715 p, 8192 8 2 8 13474 p, 4096 8 4 8 16856 p, 2048 128 10 1 18647 p
        1b: 2048 64 10 1 19001 p, 2048 32 10 1 15555 p, 2048 16 8 1 19085 p, 2048 8 8 8 19271 p, 1024 8 16 8 20959 p
        1b: 512 8 32 8 21782 p
        760m: 32768 8 1 4 7183 rp, 16384 8 1 4 13914 p, 8192 8 3 4 20106 p, 4096 8 6 4 25863 p, 2048 128 12 1 28940 p
        760m: 2048 64 12 1 29344 p, 2048 32 12 1 29648 p, 2048 16 12 1 29607 p, 2048 8 12 4 30173 p
        760m: 1024 8 24 4 33422 p, 512 8 48 4 34938 p
        350m: 32768 8 1 4 13416 p, 16384 8 2 4 22896 p, 8192 8 4 4 34933 p, 4096 8 8 4 46833 p, 2048 128 18 1 51934 p
        350m: 2048 64 18 1 52689 p, 2048 32 18 1 53811 p, 2048 16 18 1 55413 p, 2048 8 16 4 55995 p
        350m: 1024 8 32 4 62523 p, 512 8 64 4 66284 p
        125m: 32768 8 1 4 32651 p, 16384 8 2 3 55484 p, 8192 8 5 3 86858 p, 4096 8 13 3 115162 p
        125m: 2048 128 26 1 123936 p, 2048 64 26 1 125234 p, 2048 32 26 1 127122 p, 2048 16 26 1 130535 p
        125m: 2048 8 26 3 136334 p, 1024 8 52 3 148289 p, 512 8 104 3 156735 p
    """,
}


_TRITON = 1.6
"""Attention is FlashAttention in Triton (the default of ``submit_benchmarks.py`` in all commits of the tables. The runs
on 128 and more H100, of January 2024, have ``attn_impl: flash``), which takes 1.3 to 2.5 times as long as
FlashAttention-2 (arXiv 2307.08691, section 4.1). Within that it is fitted on the fitted half."""


_WHY = {
    "MPT 30b, 8192 tokens": "not known: nine tenths of memory are full, and torch's allocator may ask again and again",
    "MPT 70b, 2048 tokens, 64 A100 40GB": "not known: among twice as many GPUs each is 1.36 times as fast",
    "MPT 760m, 1024 tokens, 8 A100,": "published slower than with 2,048 tokens, and than on A100 of 40 GB",
    "MPT 760m, 512 tokens, 8 A100,": "published slower than with 2,048 tokens, and than on A100 of 40 GB",
    "MPT 1b, 2048 tokens, 32 A100 40GB": "published slower than on 16 and on 64 GPUs",
}


def _llm_foundry() -> Iterator[Published]:
    """MPT under FSDP1 of torch 1.13 to 2.1, bf16 and micro-batches that are each reduced (Composer)."""
    for table, text in _LLM_FOUNDRY.items():
        device, _, fp8 = table.partition(", ")
        rows = [
            (size, row.split())
            for line in text.split("\n")
            for size, _, own in [line.strip().partition(": ")]
            for row in own.split(", ")
            if row
        ]
        for index, (size, row) in enumerate(rows):
            length, gpus, batch, count, tokens = map(int, row[:5])
            flags, (layers, width, heads) = row[5] if row[5:] else "", _MPT[size]
            model = {"layers": layers, "width": width, "heads": heads, "length": length, "recompute": "r" in flags}
            name = f"MPT {size}, {length} tokens, {gpus} {table}, {count} x {batch}{flags and ', ' + flags}"
            why = next((why for start, why in _WHY.items() if name.startswith(start)), "")
            yield Published(
                name=name,
                source="llm-foundry, scripts/train/benchmarking/README.md (commit 8c8dd48f7)",
                half=HALVES[index % 2],
                model=partial(MPT, **model),
                engine=FSDPFacts(replicate=1, shard=gpus, reshard_after_forward="g" not in flags),
                policy=MIXED_REDUCED if "p" in flags else MIXED,
                batch=batch,
                micro_batches=count,
                length=length,
                tokens=tokens,
                device=device,
                attention=1.0 if gpus >= 128 and device == "H100" else _TRITON,
                memory=_GIB[device],
                nodes=Nodes(nodes=gpus // 8, devices=8),
                why="fp8 products are planned as bf16" if fp8 else why,
            )


def _torchtitan() -> Iterator[Published]:
    """Llama 3 on 64 A100, a sample each, not compiled."""
    llama_70b = {**_LLAMA_2["70b"], "vocabulary": LLAMA_8B["vocabulary"]}
    rows = (
        ("Llama 3 8B, every second block", LLAMA_8B, {"recompute": "full", "share": 0.5}, 2904),
        ("Llama 3 8B, every second product", LLAMA_8B, {"recompute": "op"}, 2973),
        ("Llama 3 70B, recomputed", llama_70b, {"recompute": "full"}, 331),
    )
    for index, (name, sizes, recompute, tokens) in enumerate(rows):
        yield Published(
            name=f"{name}, 64 A100",
            source="torchtitan, docs/performance.md before commit d4c86e375",
            half=HALVES[index % 2],
            model=partial(Llama, length=8192, **{**sizes, **recompute}),
            engine=FSDPFacts(replicate=1, shard=64),
            length=8192,
            unit_rules={-1: False},
            tokens=tokens,
            device="A100",
            memory=_GIB["A100"],
            nodes=Nodes(nodes=8, devices=8),
        )


FMS_FSDP, LLM_FOUNDRY, TORCHTITAN_A100 = tuple(_fms_fsdp()), tuple(_llm_foundry()), tuple(_torchtitan())

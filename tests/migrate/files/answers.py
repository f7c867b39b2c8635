"""Writes ``accelerate/*.yaml`` with Accelerate's own questionnaire, answered as below.

    pip install accelerate && python -m tests.migrate.files.answers

Run with Accelerate 1.15. A question without an answer below gets its default, and each is answered at most once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent / "accelerate"

GPUS = {"Which type of machine": "multi-GPU", "distributed training? [1]": "2"}
FSDP = {**GPUS, "FullyShardedDataParallel": "yes"}
DEEPSPEED = {**GPUS, "Do you want to use DeepSpeed": "yes"}
TWO_MACHINES = {
    "How many different machines": "2",
    "rank of this machine": 0,
    "IP address": "10.0.0.1",
    "port you will use": "29500",
    "distributed training? [1]": "4",
}

ANSWERS: dict[str, dict[str, Any]] = {
    "ddp": {**GPUS, "mixed precision": "bf16"},
    "ddp_cpu": {"Which type of machine": "multi-CPU", "distributed training? [1]": "2"},
    "ddp_two_machines": {**GPUS, **TWO_MACHINES},
    "fsdp1": {
        **FSDP,
        "FSDP version": 1,
        "sharding strategy": "FULL_SHARD",
        "auto wrap policy": "TRANSFORMER_BASED_WRAP",
        "layer class names": "Block",
        "state dict type": "FULL_STATE_DICT",
        "activation checkpointing": "yes",
        "mixed precision": "bf16",
    },
    "fsdp1_hybrid": {
        **FSDP,
        "FSDP version": 1,
        "sharding strategy": "HYBRID_SHARD",
        "auto wrap policy": "SIZE_BASED_WRAP",
        "minimum number of parameters": "1000",
        "state dict type": "SHARDED_STATE_DICT",
        "forward prefetch": "yes",
    },
    "fsdp1_no_prefetch": {
        **FSDP,
        "FSDP version": 1,
        "sharding strategy": "NO_SHARD",
        "backward prefetch": "NO_PREFETCH",
        "offload parameters": "yes",
    },
    "fsdp2": {
        **FSDP,
        "FSDP version": 2,
        "auto wrap policy": "TRANSFORMER_BASED_WRAP",
        "`_no_split_modules`": "yes",
        "mixed precision": "bf16",
    },
    "fsdp2_grad_op_offload": {
        **FSDP,
        "FSDP version": 2,
        "enable resharding": "no",
        "offload parameters": "yes",
        "auto wrap policy": "NO_WRAP",
    },
    "fsdp2_mesh": {
        **FSDP,
        "FSDP version": 2,
        "auto wrap policy": "TRANSFORMER_BASED_WRAP",
        "layer class names": "Block",
        "parallelism config": "yes",
        "replicate size": "2",
        "torch dynamo": "yes",
        "dynamo backend": "inductor",
    },
    "deepspeed_2": {
        **DEEPSPEED,
        "gradient accumulation steps": "2",
        "use gradient clipping": "yes",
        "gradient clipping value": "0.5",
        "mixed precision": "bf16",
    },
    "deepspeed_3_offload": {
        **DEEPSPEED,
        "ZeRO optimization stage": 3,
        "offload optimizer states": "cpu",
        "offload parameters": "cpu",
        "16-bit model weights": "yes",
        "deepspeed.zero.Init": "yes",
        "mixed precision": "fp16",
    },
    "deepspeed_3_two_machines": {
        **DEEPSPEED,
        **TWO_MACHINES,
        "ZeRO optimization stage": 3,
        "launcher": "pdsh",
        "hostfile": "/job/hostfile",
    },
    "deepspeed_file": {**DEEPSPEED, "json file": "yes", "path to the json": "../deepspeed/zero3_bf16.json"},
    "tensor_parallel": {
        **FSDP,
        "FSDP version": 2,
        "auto wrap policy": "TRANSFORMER_BASED_WRAP",
        "parallelism config": "yes",
        "tensor parallelism size": "2",
    },
    "megatron": {**GPUS, "Megatron-LM": "yes", "Tensor Parallelism degree": "2", "mixed precision": "bf16"},
}
"""File to its answers: words of a question to what is chosen or typed."""


def write(name: str) -> None:
    """Answer the questions of one file."""
    from accelerate.commands.config import cluster

    left = dict(ANSWERS[name])

    def answer(question: str) -> Any:
        found = next((words for words in left if words.lower() in question.lower()), None)
        return None if found is None else left.pop(found)

    def ask_options(question: str, options: list[Any], convert: Any = None, default: int = 0) -> Any:
        given = answer(question)
        place = default if given is None else list(options).index(given)
        return convert(place) if convert is not None else place

    def ask_field(question: str, convert: Any = None, default: Any = None, error_message: Any = None) -> Any:
        given = answer(question)
        return default if given is None else convert(given) if convert is not None else given

    with mock.patch.multiple(cluster, _ask_options=ask_options, _ask_field=ask_field):
        cluster.get_cluster_input().to_yaml_file(FOLDER / f"{name}.yaml")
    assert not left, f"{name}: nobody asked about {left}"


if __name__ == "__main__":
    for each in ANSWERS:
        write(each)

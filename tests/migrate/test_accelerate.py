"""Accelerate's files, which its own questionnaire of 1.15 wrote into ``files/accelerate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.migrate.support import FILES, accelerate, arguments, fsdp, zero

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Migrated = Callable[..., dict[str, Any]]
Told = Callable[..., str]


@pytest.mark.parametrize("path", sorted((FILES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_accelerate_file(path: Path, migrated: Migrated) -> None:
    given = yaml.safe_load(path.read_text())
    section = migrated(path, "--lossy")["trainer"]
    assert section["devices"] * section["num_nodes"] == given["num_processes"]
    assert section["num_nodes"] == given["num_machines"]
    assert section["accelerator"] == ("cpu" if given["use_cpu"] else "gpu")
    engine = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "FSDP"}.get(given["distributed_type"], "DDP")
    assert engine.lower() in str(section["strategy"]).lower()
    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}.get(given.get("mixed_precision", ""))
    assert section["precision"] == (precision or "bf16-mixed")  # of the one that has a DeepSpeed file


HYBRID = {"mesh": {"replicate": "auto", "shard": "auto"}}
NVME = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(2, fsdp_reshard_after_forward=False), {"reshard_after_forward": False}),
        (fsdp(2, fsdp_transformer_layer_cls_to_wrap="A, B"), {"units": ["A", "B"]}),
        (fsdp(2, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params="1e6"), {"units": 1000000}),
        (fsdp(2, fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), {"units": 100000000}),
        (fsdp(2, fsdp_auto_wrap_policy="NO_WRAP"), {"units": []}),
        (fsdp(2, fsdp_activation_checkpointing="true"), {"activation_checkpointing": "units"}),
        (
            fsdp(2, fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
            {"activation_checkpointing": "offload"},
        ),
        (fsdp(1, fsdp_sharding_strategy="shard_grad_op"), {"reshard_after_forward": False}),
        (fsdp(1, fsdp_sharding_strategy=3), {"mesh": {"replicate": "auto", "shard": 1}}),
        (fsdp(1, fsdp_reshard_after_forward="HYBRID_SHARD"), HYBRID),
        (fsdp(1, fsdp_sharding_strategy="HYBRID_SHARD_ZERO2"), {**HYBRID, "reshard_after_forward": False}),
        (
            accelerate(
                distributed_type="FSDP",
                fsdp_config={
                    "sharding_strategy": 2,
                    "offload_params": True,
                    "min_num_params": 2000,
                    "backward_prefetch_policy": 1,
                    "auto_wrap_policy": "SIZE_BASED_WRAP",
                },
            ),
            {"reshard_after_forward": False, "cpu_offload": True, "units": 2000},
        ),
        (zero(zero_stage=3, zero3_init_flag=True, zero3_save_16bit_model=True), {"stage": 3}),
        (zero(**NVME), {"stage": 3, "offload_parameters": {"device": "nvme", "nvme_path": "/nvme"}}),
        (
            zero(zero_stage=3, deepspeed_moe_layer_cls_names="A,B"),
            {"stage": 3, "stage3": {"leaf_modules": ["A", "B"]}},
        ),
        ({**zero(zero_stage=3), "parallelism_config": {"dp_shard_size": 2}}, {"stage": 3}),
    ],
)
def test_sharding(content: dict[str, Any], expected: dict[str, Any], migrated: Migrated) -> None:
    assert arguments(migrated(content)) == expected


def test_trainer_of_a_file(migrated: Migrated) -> None:
    section = migrated(zero(zero_stage=1, gradient_clipping=0.5, gradient_accumulation_steps=4))["trainer"]
    assert (section["gradient_clip_val"], section["accumulate_grad_batches"]) == (0.5, 4)
    section = migrated({**MULTI_GPU, "gpu_ids": "1,3", "gradient_accumulation_steps": 4})["trainer"]
    assert (section["devices"], section["accumulate_grad_batches"]) == ([1, 3], 4)
    assert migrated(accelerate(distributed_type="MULTI_GPU", num_processes=-1))["trainer"]["devices"] == "auto"
    several = {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1", "machine_rank": 1, "fp16": True}
    section = migrated(accelerate(distributed_type="MULTI_GPU", **several))["trainer"]
    assert (section["num_nodes"], section["devices"], section["precision"]) == (2, 8, "16-mixed")


def test_mesh_of_parallelism_config(migrated: Migrated, refused: Told) -> None:
    content = {**fsdp(), "num_processes": 8}
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert arguments(migrated({**content, "parallelism_config": sizes}))["mesh"] == {"replicate": 2, "shard": 4}
    wrong = {**content, "num_processes": 6, "parallelism_config": sizes}
    assert "multiply to 8, but num_processes is 6" in refused(wrong)
    assert "sp_size: 2 (the mesh has the axes" in refused({**zero(), "parallelism_config": {"sp_size": 2}})


DYNAMO = {"dynamo_backend": "INDUCTOR"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(1, fsdp_backward_prefetch="NO_PREFETCH"), "speed alone: FSDP2 gathers the next unit"),
        ({**fsdp(2), "dynamo_config": {**DYNAMO, "dynamo_mode": "max-autotune"}}, "speed alone: torch.compile is"),
        ({**zero(zero_stage=3), "dynamo_config": DYNAMO}, "speed alone: stage 3 gathers inside of the blocks"),
        (fsdp(1, fsdp_reshard_after_forward="SHARD_GRAD_OP"), "Accelerate 1.15 runs FULL_SHARD all the same"),
    ],
    ids=["prefetch", "dynamo", "compile", "sharding"],
)
def test_notes(content: dict[str, Any], expected: str, table: Told) -> None:
    assert expected in table(content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(1, fsdp_state_dict_type="LOCAL_STATE_DICT"), ["LOCAL_STATE_DICT", "portable directory"]),
        (fsdp(2, fsdp_ignored_modules="model.*"), ["fsdp_ignored_modules: model.*", "ignored_modules: [ClassName]"]),
        ({**fsdp(2), "mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, ["fp8", "bf16-mixed", "backend: TE"]),
        ({**fsdp(2), "dynamo_config": {"dynamo_backend": "EAGER"}}, ["dynamo_backend: EAGER", "compile: true"]),
        (accelerate(distributed_type="TP", tp_config={"tp_size": 2}), ["TP", "tp_config.tp_size: 2", "shard_fsdp"]),
    ],
    ids=["state dict", "ignored", "fp8", "dynamo", "tp"],
)
def test_lost_fields_are_refused_and_kept_as_comments(
    content: dict[str, Any], expected: list[str], refused: Told, migrated: Migrated, tmp_path: Path
) -> None:
    message = refused(content)
    assert all(part in message for part in [*expected, "--lossy"]), message
    assert "strategy" in migrated(content, "--lossy")["trainer"]
    [written] = tmp_path.glob("out*")
    comments = [line for line in written.read_text().splitlines() if line.startswith("# Not carried over: ")]
    assert len(comments) == message.count("\n  - ")


def test_mistakes_in_one_message(refused: Told) -> None:
    content = fsdp(1, fsdp_sharding_strategy="FULL_SHARD", fsdp_reshard_after_forward="SHARD_GRAD_OP")
    content["fsdp_config"] |= {"fsdp_offload_parms": True, "fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}
    message = refused({**content, "mixed_precison": "bf16", "num_machines": 3, "deepspeed_config": {"zero_stage": 2}})
    expected = [
        "5 things are wrong",
        "mixed_precison is no key of an Accelerate config file: the nearest is 'mixed_precision'",
        "num_processes is 2 on num_machines 3",
        "deepspeed_config is given, but with FSDP Accelerate does not read it",
        "the nearest is 'fsdp_offload_params'",
        "the nearest is 'TRANSFORMER_BASED_WRAP'",
    ]
    assert all(part in message for part in expected), message


MULTI_GPU = accelerate(distributed_type="MULTI_GPU")
FILE = str(FILES / "deepspeed" / "zero3_bf16.json")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (accelerate(), "distributed_type is missing"),
        ({**MULTI_GPU, "compute_environment": "AMAZON_SAGEMAKER"}, "nearest: LOCAL_MACHINE"),
        ({**MULTI_GPU, "gpu_ids": "0,b"}, "must be all, or 2 numbers"),
        (fsdp(2, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=-1), "units"),
        (fsdp(2, fsdp_sharding_strategy="SHARD_GRAD_OP"), "with fsdp_version 2 Accelerate reads"),
        (fsdp(1, fsdp_reshard_after_forward=True), "go with fsdp_version 2"),
        (fsdp(1, fsdp_sharding_strategy=1, fsdp_reshard_after_forward="SHARD_GRAD_OP"), "make them equal"),
        (fsdp(3), "fsdp_version is '3', but must be 1 or 2"),
        (zero(zero_stage=2, offload_param_device="cpu"), "with stage 2, but needs stage 3"),
        (zero(deepspeed_config_file="nope.json"), "'nope.json', but there is no such file"),
        ({**zero(deepspeed_config_file=FILE), "mixed_precision": "no"}, "make them equal, or remove one"),
    ],
)
def test_mistake(content: dict[str, Any], expected: str, refused: Told) -> None:
    assert expected in refused(content)


def test_stage_0_is_the_ddp_engine(migrated: Migrated) -> None:
    content = {**zero(zero_stage=0), "mixed_precision": "bf16"}
    assert migrated(content)["trainer"]["strategy"] == "shard_ddp"
    to = migrated(content, "--to", "shard_deepspeed_stage_0")["trainer"]
    assert (to["strategy"], to["precision"]) == ("shard_deepspeed_stage_0", "bf16-mixed")


def test_spellings_that_yaml_reads_otherwise(migrated: Migrated, tmp_path: Path) -> None:
    path = tmp_path / "no.yaml"
    path.write_text(
        "distributed_type: NO\nnum_processes: 8\n"
        "mixed_precision: no\ndowncast_bf16: yes\n_comment: mine\nfsdp_config: {a: 1}\n"
    )
    expected = {"strategy": "shard_ddp", "precision": "32-true", "accelerator": "gpu", "devices": 1}
    assert migrated(path)["trainer"] == expected

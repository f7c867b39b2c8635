"""Accelerate's files: each setting has its counterpart, or is refused and kept as a comment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.migrate.support import FILES, accelerate, arguments, fsdp, zero

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


ACCELERATE = sorted((FILES / "accelerate").glob("*.yaml"))


# Accelerate


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_every_accelerate_file(path: Path, migrated: Callable[..., dict[str, Any]]) -> None:
    given = yaml.safe_load(path.read_text())
    section = migrated(path, "--lossy")["trainer"]
    assert section["devices"] * section["num_nodes"] == given["num_processes"]
    assert section["num_nodes"] == given["num_machines"]
    assert section["accelerator"] == ("cpu" if given["use_cpu"] else "gpu")
    engine = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "FSDP"}.get(given["distributed_type"], "DDP")
    assert engine.lower() in str(section["strategy"]).lower()
    precision = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}.get(given.get("mixed_precision", ""))
    assert section["precision"] == (precision or "bf16-mixed")  # of the one that has a DeepSpeed file


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"fsdp_reshard_after_forward": True}, {}),
        ({"fsdp_reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {}),  # as many files have it
        (
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": False},
            {"reshard_after_forward": False},
        ),
        ({"fsdp_offload_params": True}, {"cpu_offload": True}),
        ({"fsdp_transformer_layer_cls_to_wrap": "A, B"}, {"units": ["A", "B"]}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e6"}, {"units": 1000000}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, {"units": 100000000}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"units": []}),
        ({"fsdp_activation_checkpointing": "true"}, {"activation_checkpointing": "units"}),
        ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, {}),
    ],
)
def test_fsdp_2(fields: dict[str, Any], expected: dict[str, Any], migrated: Callable[..., dict[str, Any]]) -> None:
    assert arguments(migrated(fsdp(2, **fields))) == expected


@pytest.mark.parametrize("field", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
@pytest.mark.parametrize(
    ("number", "word", "expected"),
    [
        (1, "FULL_SHARD", {}),
        (2, "SHARD_GRAD_OP", {"reshard_after_forward": False}),
        (3, "NO_SHARD", {"mesh": {"replicate": "auto", "shard": 1}}),
        (4, "HYBRID_SHARD", {"mesh": {"replicate": "auto", "shard": "auto"}}),
        (
            5,
            "HYBRID_SHARD_ZERO2",
            {"mesh": {"replicate": "auto", "shard": "auto"}, "reshard_after_forward": False},
        ),
    ],
)
def test_fsdp_1_sharding(
    field: str, number: int, word: str, expected: dict[str, Any], migrated: Callable[..., dict[str, Any]]
) -> None:
    for spelled in (number, word, word.lower()):
        assert arguments(migrated(fsdp(1, **{field: spelled}))) == expected


def test_fsdp_1_choice_that_accelerate_does_not_read(capsys: pytest.CaptureFixture[str], migrated: Any) -> None:
    migrated(fsdp(1, fsdp_reshard_after_forward="SHARD_GRAD_OP"))
    assert "Accelerate 1.15 runs FULL_SHARD all the same" in capsys.readouterr().out


def test_keys_of_older_files(migrated: Callable[..., dict[str, Any]]) -> None:
    old = {"sharding_strategy": 2, "offload_params": True, "min_num_params": 2000, "backward_prefetch_policy": 1}
    content = accelerate(distributed_type="FSDP", fsdp_config={**old, "auto_wrap_policy": "SIZE_BASED_WRAP"}, fp16=True)
    result = migrated(content)
    assert arguments(result) == {"reshard_after_forward": False, "cpu_offload": True, "units": 2000}
    assert result["trainer"]["precision"] == "16-mixed"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"stage": 2}),
        ({"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True}, {"stage": 3}),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        (
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"},
            {"stage": 3, "offload_parameters": {"device": "nvme", "nvme_path": "/nvme"}},
        ),
        (
            {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "A,B"},
            {"stage": 3, "stage3": {"leaf_modules": ["A", "B"]}},
        ),
    ],
)
def test_deepspeed_plugin(
    fields: dict[str, Any], expected: dict[str, Any], migrated: Callable[..., dict[str, Any]]
) -> None:
    assert arguments(migrated(zero(**fields))) == expected


def test_clipping_and_accumulation(migrated: Callable[..., dict[str, Any]]) -> None:
    section = migrated(zero(zero_stage=1, gradient_clipping=0.5, gradient_accumulation_steps=4))["trainer"]
    assert (section["gradient_clip_val"], section["accumulate_grad_batches"]) == (0.5, 4)


def test_machines_and_devices(migrated: Callable[..., dict[str, Any]]) -> None:
    section = migrated(accelerate(distributed_type="MULTI_GPU", gpu_ids="1,3"))["trainer"]
    assert section["devices"] == [1, 3]
    assert migrated(accelerate(distributed_type="MULTI_GPU", num_processes=-1))["trainer"]["devices"] == "auto"
    several = {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1", "machine_rank": 1}
    section = migrated(accelerate(distributed_type="MULTI_GPU", **several))["trainer"]
    assert (section["num_nodes"], section["devices"]) == (2, 8)


def test_mesh_of_parallelism_config(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    content = {**fsdp(), "num_processes": 8}
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert arguments(migrated({**content, "parallelism_config": sizes}))["mesh"] == {"replicate": 2, "shard": 4}
    wrong = {**content, "num_processes": 6, "parallelism_config": sizes}
    assert "is 8, but num_processes is 6" in refused(wrong)
    assert "with FSDP and fsdp_version 2 alone" in refused({**content, "parallelism_config": sizes, "fsdp_config": {}})


@pytest.mark.parametrize(
    ("given", "expected"), [((True, True), "offload"), ((True, False), "units"), ((False, True), None)]
)
def test_checkpointed_inputs_on_the_host(
    given: tuple[bool, bool], expected: str | None, migrated: Callable[..., dict[str, Any]]
) -> None:
    checkpoints, offloads = given
    options = {"fsdp_activation_checkpointing": checkpoints, "fsdp_activation_checkpointing_offload": offloads}
    assert arguments(migrated(fsdp(2, **options))).get("activation_checkpointing") == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(1, fsdp_backward_prefetch="NO_PREFETCH"), ["NO_PREFETCH", "speed alone: ", "BACKWARD_PRE"]),
        ({**fsdp(2), "debug": True}, ["debug", "doctor"]),
        (
            {**fsdp(2), "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
            ["max-autotune", "its defaults"],
        ),
        ({**zero(zero_stage=3), "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["INDUCTOR", "stage_2"]),
        (zero(deepspeed_multinode_launcher="pdsh"), ["pdsh", "`lightning-shard slurm`"]),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0],
)
def test_what_changes_no_number_is_noted(
    content: dict[str, Any], expected: list[str], noted: Callable[..., str]
) -> None:
    message = noted(content)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(1, fsdp_state_dict_type="LOCAL_STATE_DICT"), ["LOCAL_STATE_DICT", "portable directory"]),
        (fsdp(2, fsdp_ignored_modules="model.*"), ["fsdp_ignored_modules: model.*", "ignored_modules: [ClassName]"]),
        ({**fsdp(2), "mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, ["fp8", "bf16-mixed", "backend: TE"]),
        ({**fsdp(2), "dynamo_config": {"dynamo_backend": "EAGER"}}, ["dynamo_backend: EAGER", "compile: true"]),
        (accelerate(distributed_type="TP", tp_config={"tp_size": 2}), ["TP", "tp_config.tp_size: 2", "shard_fsdp"]),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0].replace(" ", ""),
)
def test_what_has_no_counterpart_is_refused_and_kept_as_a_comment(
    content: dict[str, Any],
    expected: list[str],
    refused: Callable[..., str],
    migrated: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    message = refused(content)
    assert all(part in message for part in expected), message
    assert "--lossy" in message
    assert "strategy" in migrated(content, "--lossy")["trainer"]
    [written] = tmp_path.glob("out*")
    comments = [line for line in written.read_text().splitlines() if line.startswith("# Not carried over: ")]
    assert len(comments) == message.count("\n  - ")


def test_mistakes_in_one_message(refused: Callable[..., str]) -> None:
    message = refused(
        {
            "distributed_type": "FSDP",
            "mixed_precison": "bf16",
            "num_machines": 3,
            "num_processes": 4,
            "deepspeed_config": {"zero_stage": 2},
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
                "fsdp_offload_parms": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_WRAP",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_sync_module_states": False,
                "fsdp_min_num_params": "many",
            },
        }
    )
    expected = [
        "8 things are wrong",
        "mixed_precison is no key of an Accelerate config file: the nearest is 'mixed_precision'",
        "num_processes is 4 on num_machines 3",
        "deepspeed_config is given, but distributed_type is FSDP",
        "the nearest is 'fsdp_offload_params'",
        "fsdp_sharding_strategy FULL_SHARD and fsdp_reshard_after_forward SHARD_GRAD_OP, which contradict",
        "the nearest is 'TRANSFORMER_BASED_WRAP'",
        "fsdp_cpu_ram_efficient_loading is true with fsdp_sync_module_states false",
        "fsdp_min_num_params is 'many', but must be a whole number",
    ]
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (accelerate(), "distributed_type is missing"),
        (accelerate(distributed_type="FDSP"), "the nearest is 'FSDP'"),
        (accelerate(distributed_type="MULTI_XPU"), "run on CUDA devices and on CPUs"),
        ({"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, "LOCAL_MACHINE"),
        (accelerate(distributed_type="MULTI_GPU", gpu_ids="0"), "num_processes asks for 2"),
        (accelerate(distributed_type="MULTI_GPU", gpu_ids="0,b"), "must be all, or numbers with commas between them"),
        (fsdp(2, fsdp_min_num_params=-1), "fsdp_min_num_params is '-1', but must be a whole number of 0 or more"),
        (fsdp(2, fsdp_transformer_layer_cls_to_wrap=[1]), "'[1]', but must be names, as a list or with commas"),
        (accelerate(distributed_type="MULTI_GPU", mixed_precision="bf61"), "the nearest is 'bf16'"),
        (accelerate(distributed_type="MULTI_GPU", fsdp_config={"fsdp_version": 2}), "does not read it"),
        (fsdp(2, fsdp_sharding_strategy="SHARD_GRAD_OP"), "with fsdp_version 2 Accelerate reads"),
        (fsdp(2, fsdp_reshard_after_forward="FULL_SHARD"), "must be true or false"),
        (fsdp(1, fsdp_reshard_after_forward=True), "go with fsdp_version 2"),
        (fsdp(3), "fsdp_version is '3', but must be 1 or 2"),
        (zero(zero_stage=7), "zero_stage is '7', but must be one of 0, 1, 2, 3"),
        (zero(zero_stage=2, offload_param_device="cpu"), "with stage 2, but needs stage 3"),
        (zero(zero_stage=3, offload_param_device="nvme"), "without nvme_path"),
        (zero(deepspeed_config_file="nope.json"), "'nope.json', but there is no such file"),
    ],
)
def test_mistake(content: dict[str, Any], expected: str, refused: Callable[..., str]) -> None:
    assert expected in refused(content)


def test_stage_0_is_the_ddp_engine(migrated: Callable[..., dict[str, Any]]) -> None:
    content = {**zero(zero_stage=0), "mixed_precision": "bf16"}
    assert migrated(content)["trainer"]["strategy"] == "shard_ddp"
    to = migrated(content, "--to", "shard_deepspeed_stage_0")["trainer"]
    assert (to["strategy"], to["precision"]) == ("shard_deepspeed_stage_0", "bf16-mixed")


def test_beside_a_deepspeed_file_nothing_else_says_its_values(refused: Callable[..., str]) -> None:
    file = str(FILES / "deepspeed" / "zero3_bf16.json")
    content = {**zero(deepspeed_config_file=file, zero_stage=2, gradient_clipping=1.0), "mixed_precision": "bf16"}
    message = refused(content)
    assert message.count("which Accelerate refuses") == 3


def test_spellings_that_yaml_reads_otherwise_and_sections_that_are_not_read(
    migrated: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "no.yaml"
    path.write_text(
        "distributed_type: NO\nnum_processes: 8\n"
        "mixed_precision: no\ndowncast_bf16: yes\n_comment: mine\nfsdp_config: {a: 1}\n"
    )
    assert migrated(path)["trainer"] == {
        "strategy": "shard_ddp",
        "precision": "32-true",
        "accelerator": "gpu",
        "devices": 1,
    }
    table = capsys.readouterr().out
    assert "Accelerate does not read it with distributed_type NO either" in table
    assert "with distributed_type NO Accelerate starts one process" in table
    assert "loaded in 16 bits" in table
    migrated(fsdp(2, fsdp_min_num_params=5), "--to", "shard_deepspeed_stage_3")
    table = capsys.readouterr().out
    assert "FSDP is not the engine" in table
    assert "Accelerate does not read it with TRANSFORMER_BASED_WRAP either" in table


def test_the_axes_of_deepspeed(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    content = zero(zero_stage=3)
    assert arguments(migrated({**content, "parallelism_config": {"dp_shard_size": 2}}))["stage"] == 3
    assert "sp_size: 2. The mesh has the axes" in refused({**content, "parallelism_config": {"sp_size": 2}})


def test_accumulation_at_the_top_of_the_file(migrated: Callable[..., dict[str, Any]]) -> None:
    given = {"distributed_type": "MULTI_GPU", "num_processes": 8, "gradient_accumulation_steps": 4}
    assert migrated(given)["trainer"]["accumulate_grad_batches"] == 4

"""Configurations of Accelerate, DeepSpeed and stock Lightning become this package's, and nothing is lost unseen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_shard import ConfigurationError, __main__, registry
from lightning_shard.commands import migrate as migrate_command
from lightning_shard.migrate import accelerate_fields, equivalents, own, stock_fields, together
from lightning_shard.migrate.fields import Field, nearest
from lightning_shard.migrate.form import shown
from tests.harness import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FILES = ROOT / "tests" / "migrate" / "files"
ACCELERATE = sorted((FILES / "accelerate").glob("*.yaml"))
LIGHTNING = sorted(path for path in (FILES / "lightning").glob("*.yaml") if path.stem != "base")
DEEPSPEED = [
    *sorted((ROOT / "tests/engines/zero/config/files").glob("*.json")),
    *sorted((FILES / "deepspeed").glob("*.json")),
]
BASE = FILES / "lightning" / "base.yaml"


@pytest.fixture
def migrated(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Migrate files, or a content given in their place; the YAML's content."""

    def run(*words: object) -> dict[str, Any]:
        output = tmp_path / f"out{len(list(tmp_path.iterdir()))}.yaml"
        assert migrate_command.main([*_files(tmp_path, words), "--output", str(output)]) == 0
        return yaml.safe_load(output.read_text())

    return run


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Migrate what is refused; the message."""

    def run(*words: object) -> str:
        with pytest.raises(ConfigurationError) as raised:
            migrate_command.main(_files(tmp_path, words))
        return str(raised.value)

    return run


def _files(folder: Path, words: tuple[object, ...]) -> list[str]:
    """Mappings as files: DeepSpeed's as JSON, others as YAML."""
    given = []
    for number, word in enumerate(words):
        if isinstance(word, dict):
            deepspeed = "zero_optimization" in word
            path = folder / f"in{number}.{'json' if deepspeed else 'yaml'}"
            path.write_text(json.dumps(word) if deepspeed else yaml.safe_dump(word))
            word = path
        given.append(str(word))
    return given


def accelerate(**fields: Any) -> dict[str, Any]:
    """An Accelerate file for two processes."""
    return {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, **fields}


def fsdp(version: int = 2, **fields: Any) -> dict[str, Any]:
    section = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return accelerate(distributed_type="FSDP", fsdp_config={**section, **fields})


def zero(**fields: Any) -> dict[str, Any]:
    return accelerate(distributed_type="DEEPSPEED", deepspeed_config=fields)


def trainer(strategy: Any, arguments: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A Lightning YAML."""
    given = strategy if arguments is None else {"class_path": strategy, "init_args": arguments}
    return {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": given, **fields}}


def arguments(content: dict[str, Any]) -> dict[str, Any]:
    """The strategy's arguments, whether it is written by its name or by its class."""
    strategy = content["trainer"]["strategy"]
    return dict(registry.find(strategy).init_args) if isinstance(strategy, str) else strategy.get("init_args", {})


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
        ({"zero_stage": 0}, {"stage": 0}),
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


def test_machines_and_devices(migrated: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    section = migrated(accelerate(distributed_type="MULTI_GPU", gpu_ids="1,3"))["trainer"]
    assert section["devices"] == [1, 3]
    assert migrated(accelerate(distributed_type="MULTI_GPU", num_processes=-1))["trainer"]["devices"] == "auto"
    several = {"num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1", "machine_rank": 1}
    section = migrated(accelerate(distributed_type="MULTI_GPU", **several))["trainer"]
    assert (section["num_nodes"], section["devices"]) == (2, 8)
    written = max(tmp_path.glob("out*"), key=lambda path: path.stat().st_mtime_ns).read_text()
    assert "MASTER_ADDR=10.0.0.1 NODE_RANK=1 lightning-shard fit" in written


def test_mesh_of_parallelism_config(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    content = {**fsdp(), "num_processes": 8}
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert arguments(migrated({**content, "parallelism_config": sizes}))["mesh"] == {"replicate": 2, "shard": 4}
    wrong = {**content, "num_processes": 6, "parallelism_config": sizes}
    assert "is 8, but num_processes is 6" in refused(wrong)
    assert "with FSDP and fsdp_version 2 alone" in refused({**content, "parallelism_config": sizes, "fsdp_config": {}})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (fsdp(1, fsdp_backward_prefetch="NO_PREFETCH"), ["fsdp_backward_prefetch: NO_PREFETCH", "BACKWARD_PRE"]),
        (fsdp(1, fsdp_state_dict_type="LOCAL_STATE_DICT"), ["LOCAL_STATE_DICT", "portable directory"]),
        (fsdp(2, fsdp_ignored_modules="model.*"), ["fsdp_ignored_modules: model.*", "ignored_modules: [ClassName]"]),
        (
            fsdp(2, fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
            ["fsdp_activation_checkpointing_offload", "save_on_cpu"],
        ),
        ({**fsdp(2), "mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, ["fp8", "bf16-mixed", "backend: TE"]),
        ({**fsdp(2), "debug": True}, ["debug: true", "doctor"]),
        ({**fsdp(2), "dynamo_config": {"dynamo_backend": "EAGER"}}, ["dynamo_backend: EAGER", "compile: true"]),
        (
            {**fsdp(2), "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
            ["max-autotune", "its defaults"],
        ),
        (
            {**zero(zero_stage=3), "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            ["dynamo_backend: INDUCTOR", "shard_deepspeed_stage_2"],
        ),
        (zero(deepspeed_multinode_launcher="pdsh"), ["pdsh", "`lightning-shard slurm`"]),
        (accelerate(distributed_type="TP", tp_config={"tp_size": 2}), ["TP", "tp_config.tp_size: 2", "shard_fsdp"]),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0].replace(" ", ""),
)
def test_what_has_no_equal_is_refused_and_kept_as_a_comment(
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
        (accelerate(distributed_type="MULTI_GPU", mixed_precision="bf61"), "the nearest is 'bf16'"),
        (accelerate(distributed_type="MULTI_GPU", fsdp_config={"fsdp_version": 2}), "does not read it"),
        (fsdp(2, fsdp_sharding_strategy="FULL_SHARD"), "fsdp_version is 2"),
        (fsdp(2, fsdp_reshard_after_forward="FULL_SHARD"), "must be true or false"),
        (fsdp(1, fsdp_reshard_after_forward=True), "go with fsdp_version 2"),
        (fsdp(3), "fsdp_version is '3', but must be 1 or 2"),
        (zero(zero_stage=7), "zero_stage is '7', but must be one of 0, 1, 2, 3"),
        (zero(zero_stage=2, offload_param_device="cpu"), "parameters are cut, and so can be offloaded, in stage 3"),
        (zero(zero_stage=3, offload_param_device="nvme"), "without nvme_path"),
        (zero(deepspeed_config_file="nope.json"), "'nope.json', but there is no such file"),
        ({**zero(zero_stage=0), "mixed_precision": "bf16"}, "use --to shard_ddp"),
    ],
)
def test_mistake(content: dict[str, Any], expected: str, refused: Callable[..., str]) -> None:
    assert expected in refused(content)


def test_beside_a_deepspeed_file_nothing_else_says_its_values(refused: Callable[..., str]) -> None:
    file = str(FILES / "deepspeed" / "zero3_bf16.json")
    content = {**zero(deepspeed_config_file=file, zero_stage=2, gradient_clipping=1.0), "mixed_precision": "bf16"}
    message = refused(content)
    assert message.count("where Accelerate refuses it") == 3


# DeepSpeed


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_every_deepspeed_file(path: Path, migrated: Callable[..., dict[str, Any]]) -> None:
    stage = json.loads(path.read_text())["zero_optimization"]
    stage = int(stage["stage"]) if isinstance(stage, dict) else 0
    result = migrated(path)
    assert arguments(result)["stage"] == stage
    for name in [name for name in registry.PRESETS if not name.endswith("_aligned")]:
        if "stage_0" not in name and not (stage < 3 and "nvme" in name):
            strategy = migrated(path, "--to", name, "--lossy")["trainer"]["strategy"]
            kind = strategy if isinstance(strategy, str) else strategy["class_path"]
            assert name.split("_")[1] in kind.lower()


def test_deepspeed_values_of_the_trainer(migrated: Callable[..., dict[str, Any]]) -> None:
    content = {
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 1000},
        "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 3,
        "communication_data_type": "FP16",
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"thread_count": 2},
    }
    result = migrated(content)
    section = result["trainer"]
    assert (section["gradient_clip_val"], section["accumulate_grad_batches"]) == (0.5, 3)
    assert section["plugins"] == [
        {
            "class_path": "lightning_shard.ShardPrecision",
            "init_args": {
                "precision": "16-mixed",
                "loss_scale": {"initial": 4096.0, "growth_interval": 1000, "hysteresis": 1, "minimum": 1.0},
            },
        }
    ]
    assert "precision" not in section
    assert arguments(result) == {
        "stage": 3,
        "zero_plus_plus": {"hpz_partition_size": 2},
        "communication_data_type": "fp16",
        "stage3": {"prefetch_bucket_size": 1000},
        "config": {"train_micro_batch_size_per_gpu": 4, "aio": {"intra_op_parallelism": 2}},
    }
    for_fsdp = migrated({**content, "zero_optimization": {"stage": 3}}, "--to", "shard_fsdp", "--lossy")
    assert for_fsdp["trainer"]["plugins"][0]["init_args"]["reduce"] == "fp16"


def test_deepspeed_mistakes_and_removed_features(refused: Callable[..., str]) -> None:
    message = refused({"zero_optimization": {"stage": 2, "overlap_com": True}, "bf16": {"enabled": "yes"}})
    assert "zero_optimization.overlap_com is no key of DeepSpeed's: the nearest is 'overlap_comm'" in message
    assert "bf16.enabled is 'yes', but must be true or false" in message
    both = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "both true" in refused(both)
    removed = {
        "zero_optimization": {"stage": 3, "mics_shard_size": 4},
        "fp16": {"enabled": True, "loss_scale": 128.0},
        "curriculum_learning": {"enabled": True},
        "dataloader_drop_last": True,
    }
    message = refused(removed)
    assert "4 fields have no equal" in message
    assert "Nearest: shard_fsdp_hybrid" in message


def test_only_what_differs_from_a_default_is_lost(refused: Callable[..., str]) -> None:
    defaults = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}}
    message = refused({"zero_optimization": {**defaults, **both, "reduce_bucket_size": 7}}, "--to", "shard_fsdp")
    assert message.count("\n  - ") == 1
    assert "reduce_bucket_size: 7" in message


# Stock Lightning


@pytest.mark.parametrize("path", LIGHTNING, ids=lambda path: path.stem)
def test_every_lightning_file_carries_the_rest_over(path: Path, migrated: Callable[..., dict[str, Any]]) -> None:
    before, after = yaml.safe_load(BASE.read_text()), migrated(BASE, path, "--lossy")
    assert list(after)[:4] == ["seed_everything", "trainer", "model", "data"]
    for key in ("seed_everything", "model", "data"):
        assert _contains(after[key], before[key])
    assert _contains(after["trainer"], {key: value for key, value in before["trainer"].items() if key != "callbacks"})
    assert "shard" in str(after["trainer"]["strategy"])


def _contains(after: Any, before: Any) -> bool:
    """Whether everything that was there still is; a file laid over another may have more."""
    if isinstance(before, dict):
        return all(key in after and _contains(after[key], value) for key, value in before.items())
    return bool(after == before)


def test_every_stock_name_is_known() -> None:
    stock = {name for name in StrategyRegistry if name not in registry.PRESETS}
    # Of other devices.
    stock -= {name for name in stock if re.match("xla|single_xla|single_tpu|hpu", name)}
    assert stock <= set(stock_fields.NAMES), stock - set(stock_fields.NAMES)


@pytest.mark.parametrize("kind", stock_fields.FIELDS)
def test_every_stock_argument_is_known(kind: str) -> None:
    import inspect

    from lightning.pytorch import strategies

    signature = inspect.signature(getattr(strategies, kind)).parameters.values()
    named = {p.name for p in signature if p.kind is not p.VAR_KEYWORD}
    assert named <= set(stock_fields.FIELDS[kind])
    if not any(p.kind is p.VAR_KEYWORD for p in signature):
        assert named == set(stock_fields.FIELDS[kind])
    # What the others pass on.
    engine = {"DDPStrategy": DistributedDataParallel, "FSDPStrategy": FullyShardedDataParallel}.get(kind)
    if engine is not None:
        assert set(inspect.signature(engine).parameters) - {"module"} <= set(stock_fields.FIELDS[kind])


@pytest.mark.parametrize("name", stock_fields.NAMES)
def test_every_stock_name(name: str, migrated: Callable[..., dict[str, Any]]) -> None:
    result = migrated(trainer(name))
    expected = {
        "auto": "shard_ddp",
        "ddp": "shard_ddp",
        "fsdp": "shard_fsdp",
        "fsdp_cpu_offload": "shard_fsdp_offload",
        "deepspeed": "shard_deepspeed_stage_2",
    }.get(name, f"shard_{name}")
    if name.startswith("deepspeed") and "nvme" not in name:
        assert result["trainer"]["strategy"] == expected
    unused = "unused_parameters_true" in name
    assert arguments(result).get("find_unused_parameters", False) is unused
    start = next((word for word in ("spawn", "fork") if word in name), "fork" if "notebook" in name else "popen")
    assert arguments(result).get("start_method", "popen") == start


@pytest.mark.parametrize(
    ("strategy", "precision", "expected"),
    [
        ("deepspeed_stage_3", "bf16-true", "bf16-mixed"),
        ("deepspeed_stage_3", "16-true", "16-mixed"),
        ("deepspeed_stage_3", "bf16", "bf16-mixed"),
        ("fsdp", "bf16-true", "bf16-true"),
        ("ddp", 32, "32-true"),
        ("ddp", "16", "16-mixed"),
    ],
)
def test_precision_means_the_same_masters(
    strategy: str, precision: Any, expected: str, migrated: Callable[..., dict[str, Any]]
) -> None:
    assert migrated(trainer(strategy, precision=precision))["trainer"]["precision"] == expected


def test_stock_fsdp_class(migrated: Callable[..., dict[str, Any]]) -> None:
    result = migrated(BASE, FILES / "lightning" / "fsdp_class.yaml")
    assert arguments(result) == {
        "mesh": {"replicate": 2, "shard": 1},
        "units": ["Block"],
        "forward_prefetch": 1,
        "timeout_seconds": 1200.0,
        "activation_checkpointing": ["Block"],
    }
    [callback] = result["trainer"]["callbacks"]
    assert callback["init_args"] == {"monitor": "val_perplexity", "filename": "{epoch}-{step}.full"}


def test_stock_deepspeed_class(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    path = "lightning.pytorch.strategies.DeepSpeedStrategy"
    result = migrated(trainer(path, {"offload_optimizer": True, "partition_activations": False, "single_submit": True}))
    assert arguments(result) == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "config": {"aio": {"single_submit": True}},
    }
    assert "deepspeed.checkpointing.configure" in refused(trainer(path, {"cpu_checkpointing": True}))
    message = refused(trainer(path, {"config": {"zero_optimization": {"stage": 1}}, "stage": 3, "stagee": 1}))
    assert "beside config, where Lightning does not read them" in message
    assert "stagee is no key of DeepSpeedStrategy: the nearest is 'stage'" in message
    assert "the loss scale is dynamic" in refused(trainer(path, {"loss_scale": 64.0})).lower()


def test_ddp_options_of_32_true_alone(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    path = "pytorch_lightning.strategies.DDPStrategy"
    content = trainer(path, {"static_graph": True, "broadcast_buffers": False})
    assert arguments(migrated(content)) == {"static_graph": True, "broadcast_buffers": False}
    content["trainer"]["precision"] = "bf16-mixed"
    assert refused(content).count("for 32-true") == 2


def test_stock_mistakes_in_one_message(refused: Callable[..., str]) -> None:
    content = trainer(
        "lightning.pytorch.strategies.FSDPStrategy",
        {"sharding_strategy": "FULL", "cpu_ofload": True, "timeout": "soon", "device_mesh": [2, 1]},
        max_epohs=3,
        precision="bf17",
    )
    message = refused({**content, "trianer": {}})
    expected = ["trianer", "max_epohs", "'FULL'", "cpu_ofload", "'soon'", "bf17", "6 things are wrong"]
    assert all(part in message for part in expected), message
    assert "goes with sharding_strategy HYBRID_SHARD" in refused(trainer("FSDPStrategy", {"device_mesh": [2, 1]}))
    assert "the nearest is 'shard_fsdp'" in refused(trainer("shard_fspd"))
    assert "nothing is known here" in refused(trainer("my.OwnStrategy"))
    assert "precision: 64" in refused(trainer("ddp", precision=64))


# Between the engines of this package


EVERYTHING = {
    "aligned": True,
    "cpu_offload": True,
    "units": ["Block"],
    "activation_checkpointing": "units",
    "forward_prefetch": 2,
    "reshard_after_forward": 2,
    "mesh": {"replicate": 1, "shard": "auto"},
    "timeout_seconds": 60.0,
    "preemption": {"requeue": False},
}


def test_from_fsdp_to_deepspeed(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    content = trainer("lightning_shard.ShardFSDPStrategy", EVERYTHING, precision="bf16-mixed")
    message = refused(content, "--to", "shard_deepspeed_stage_3")
    assert message.count("\n  - ") == 2
    assert "units: [Block]" in message
    assert "forward_prefetch: 2" in message
    result = migrated(content, "--to", "shard_deepspeed_stage_3", "--lossy")
    assert arguments(result) == {
        "stage": 3,
        "aligned": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_parameters": {"device": "cpu"},
        "activation_checkpointing": ["Block"],
        "zero_plus_plus": {"hpz_partition_size": 2},
        "timeout_seconds": 60.0,
        "preemption": {"requeue": False},
    }
    assert result["trainer"]["precision"] == "bf16-mixed"
    # Nothing is gathered in stage 2, and parameters stay on the device.
    assert refused(content, "--to", "shard_deepspeed_stage_2").count("\n  - ") == 1


def test_from_deepspeed_to_fsdp(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    own = "lightning_shard.ShardDeepSpeedStrategy"
    arguments_given = {
        "stage": 3,
        "offload_optimizer": {},
        "offload_parameters": {"device": "cpu"},
        "zero_plus_plus": {"hpz_partition_size": 2},
        "activation_checkpointing": 2,
        "communication_data_type": "bf16",
    }
    content = trainer(own, arguments_given, precision="bf16-mixed", num_nodes=2)
    result = migrated(content, "--to", "shard_fsdp")
    assert arguments(result) == {
        "reshard_after_forward": 2,
        "cpu_offload": True,
        "activation_checkpointing": 2,
    }
    [plugin] = result["trainer"]["plugins"]
    assert plugin["init_args"] == {"precision": "bf16-mixed", "reduce": "bf16"}
    half = trainer(own, {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert "together, or nothing" in refused(half, "--to", "shard_fsdp")
    assert migrated(half, "--to", "shard_fsdp_offload")["trainer"]["strategy"] == "shard_fsdp_offload"


def test_hybrid_is_never_lost_unseen(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    content = trainer("shard_fsdp_hybrid_aligned")
    for name in ("shard_deepspeed_stage_3", "shard_deepspeed_stage_1"):
        assert "0.19 removed MiCS" in refused(content, "--to", name)
    # What the name leaves open is the source's.
    assert migrated(content, "--to", "shard_fsdp")["trainer"]["strategy"] == "shard_fsdp_hybrid_aligned"


def test_accumulation_that_rounds_otherwise_is_named(
    capsys: pytest.CaptureFixture[str], migrated: Callable[..., dict[str, Any]]
) -> None:
    content = trainer("shard_deepspeed_stage_1", accumulate_grad_batches=4)
    migrated(content, "--to", "shard_fsdp")
    assert "reduced after each micro-batch, and were once at the boundary" in capsys.readouterr().out
    migrated(content, "--to", "shard_ddp")
    assert "other fp32 roundings" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in registry.PRESETS if "stage_0_aligned" not in name])
def test_a_name_is_itself(name: str, migrated: Callable[..., dict[str, Any]]) -> None:
    assert migrated(trainer(name))["trainer"]["strategy"] == name
    assert migrated(trainer("shard_ddp"), "--to", name)["trainer"]["strategy"] == name


def test_every_argument_of_every_strategy_is_known() -> None:
    import inspect

    import lightning_shard

    for kind, engine in own.OWN_ENGINES.items():
        signature = set(inspect.signature(getattr(lightning_shard, kind)).parameters)
        assert signature == {name.partition(".")[0] for name in own.arguments_of(engine)}


def test_every_deepspeed_field_is_known() -> None:
    from lightning_shard.engines.zero.config.merging import KEYS

    assert set(KEYS) <= set(own.arguments_of("deepspeed"))


def test_every_setting_of_the_tables_has_an_answer() -> None:
    tables: list[dict[str, Field]] = [
        dict(table)
        for table in (
            accelerate_fields.TOP,
            accelerate_fields.FSDP,
            accelerate_fields.DEEPSPEED,
            accelerate_fields.PARALLELISM,
            accelerate_fields.DYNAMO,
            *stock_fields.FIELDS.values(),
        )
    ]
    for table in tables:
        for described in table.values():
            name = described.name
            assert not name or name in equivalents.TABLE or name in together.SPECIAL or name.startswith("config.")


# The command


def test_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]) -> None:
    source = str(FILES / "accelerate" / "fsdp2.yaml")
    assert migrate_command.main([source]) == 0
    shown_ = capsys.readouterr()
    assert yaml.safe_load(shown_.out)["trainer"]["strategy"] == "shard_fsdp"
    assert "fsdp_config.fsdp_auto_wrap_policy" in shown_.err
    assert "asking for nothing: " in shown_.err
    output = tmp_path / "run.yaml"
    migrate_command.main([source, "--output", str(output)])
    assert output.read_text() == shown_.out.replace(source, f"{source} --output {output}")
    assert f"written to {output}" in capsys.readouterr().out
    assert "exists: choose another path" in refused(source, "--output", output)
    assert "there is no folder" in refused(source, "--output", tmp_path / "nowhere" / "run.yaml")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: [1\nb: 2", "can't be read"),
        ("a.yaml", "- 1", "holds a list"),
        ("a.yaml", "trainer: {devices: 1, devices: 2}", "'devices' is there twice"),
        ("a.json", '{"zero_optimization": {"stage": 1, "stage": 2}}', "'stage' is there twice"),
        ("a.yaml", "learning_rate: 1", "none of the known formats"),
    ],
)
def test_unreadable_file(name: str, text: str, expected: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / name).write_text(text)
    assert expected in refused(tmp_path / name)
    assert "no such file" in refused(tmp_path / "nope.yaml")


def test_several_files(migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    result = migrated(BASE, FILES / "accelerate" / "fsdp1.yaml", "--to", "shard_fsdp_aligned")
    assert result["trainer"]["accelerator"] == "cpu"
    assert result["model"]["class_path"] == "examples.gpt.GPT"
    assert arguments(result)["aligned"] is True
    both = [FILES / "accelerate" / "fsdp1.yaml", FILES / "deepspeed" / "zero3_bf16.json"]
    assert "each say the whole strategy" in refused(*both)
    open_ = {"trainer": {"strategy": "auto", "devices": "auto", "accelerator": "auto", "max_steps": 3}}
    section = migrated(open_, FILES / "accelerate" / "ddp_cpu.yaml")["trainer"]
    assert section.pop("num_nodes") == 1
    assert section == {
        "strategy": "shard_ddp",
        "precision": "32-true",
        "max_steps": 3,
        "accelerator": "cpu",
        "devices": 2,
    }
    named = trainer("shard_ddp")
    assert "another file says the strategy too" in refused(named, FILES / "accelerate" / "ddp_cpu.yaml")
    other = {"trainer": {"devices": 3}}
    assert "num_processes is 2, but trainer.devices is 3" in refused(other, FILES / "accelerate" / "ddp_cpu.yaml")


def test_what_the_parser_refuses_is_not_written(refused: Callable[..., str]) -> None:
    content = trainer("lightning_shard.ShardFSDPStrategy", {"mesh": {"replicate": 3}})
    assert "mesh.replicate: 3 does not divide the 2 processes" in refused(content)
    content = trainer("lightning_shard.ShardFSDPStrategy", {"units": 3.5})
    assert "units" in refused(content)
    assert "shard_deepspeed_stage_2_offload" in refused(trainer("shard_deepspeed_stage_2", precision="16-true"))


def test_through_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-shard", "migrate", "nope.yaml"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: nope.yaml: there is no such file")


def test_stdout_is_yaml_alone(tmp_path: Path) -> None:
    path = str(FILES / "deepspeed" / "zero3_bf16.json")
    command = [sys.executable, "-m", "lightning_shard", "migrate", path]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.startswith("# Written by `lightning-shard migrate ")
    assert yaml.safe_load(run.stdout)["trainer"]["precision"] == "bf16-mixed"
    assert "zero_optimization.stage" in run.stderr


def test_shown() -> None:
    assert shown({"a": [True, None, 1.0, "b"]}) == "{a: [true, null, 1.0, b]}"
    assert nearest("fsdp", ["FSDP", "NO"]) == ": the nearest is 'FSDP'"
    assert nearest("entirely", ["other"]) == ""


def test_what_runs_forward_goes_to_every_engine_but_compiling_to_stage_3(
    migrated: Callable[..., dict[str, Any]], refused: Callable[..., str]
) -> None:
    asked = {"compile": True, "activation_checkpointing": "selective"}
    content = trainer("lightning_shard.ShardFSDPStrategy", asked)
    assert arguments(migrated(content, "--to", "shard_ddp")) == asked
    assert arguments(migrated(content, "--to", "shard_deepspeed_stage_2")) == {"stage": 2, **asked}
    message = refused(content, "--to", "shard_deepspeed_stage_3")
    assert message.count("\n  - ") == 1
    assert "compile: true. Stage 3 gathers inside of the blocks" in message

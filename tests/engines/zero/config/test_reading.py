"""Values and keys of a DeepSpeed file: what is understood, and what is refused with the nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.engines.zero.config import keys, reading
from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from tests.engines.zero.config.support import ZERO, configured, refusal, run_facts, settings_of


@given(st.integers(min_value=1, max_value=2**60))
def test_whole_numbers_are_understood_as_text_and_as_floats(number: int) -> None:
    forms: list[Any] = [number, str(number), f" {number}"]
    if number < 2**53:
        forms += [float(number), str(float(number)), repr(float(number)).replace("e", "E")]
    for form in forms:
        problems: list[str] = []
        [read] = reading.canonical_config({ZERO: {"reduce_bucket_size": form}}, problems)[ZERO].values()
        assert (read, type(read), problems) == (number, int, [])


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_numbers_are_understood_as_text(number: float) -> None:
    problems: list[str] = []
    assert reading.canonical_config({"gradient_clipping": repr(number)}, problems) == {"gradient_clipping": number}
    assert problems == []


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled is 'maybe', but DeepSpeed's rule is: Input should be a valid b"),
        ({"fp16": {"enabled": 2}}, "fp16.enabled is 2, but DeepSpeed's rule is: Input should be a valid boolean"),
        ({"prescale_gradients": "maybe"}, "prescale_gradients is 'maybe', but DeepSpeed's rule is: Input should be a"),
        ({"fp16": {"hysteresis": 1.5}}, "fp16.hysteresis is 1.5, but DeepSpeed's rule is: Input should be a valid int"),
        ({ZERO: {"reduce_bucket_size": "5e-1"}}, f"{ZERO}.reduce_bucket_size is 0.5, but DeepSpeed's rule is: Input"),
        ({ZERO: {"reduce_bucket_size": "big"}}, f"{ZERO}.reduce_bucket_size is 'big', but DeepSpeed's rule is: Input"),
        ({ZERO: {"reduce_bucket_size": 0}}, f"{ZERO}.reduce_bucket_size is 0, but DeepSpeed's rule is: Input should"),
        ({ZERO: {"stage": 4}}, f"{ZERO}.stage is 4, but DeepSpeed's rule is: Input should be"),
        ({ZERO: {"stage": "two"}}, f"{ZERO}.stage is 'two', but DeepSpeed's rule is: Input should be 0, 1"),
        ({ZERO: 2}, f"{ZERO} is 2, but must be a mapping of keys"),
        ({ZERO: {"stage": 3, "compute_grad_norm": False}}, "compute_grad_norm=false is supported only with ZeRO Stage"),
        (
            {ZERO: {"offload_optimizer": {"device": "gpu"}}},
            f"{ZERO}.offload_optimizer.device is 'gpu', but DeepSpeed's",
        ),
        ({ZERO: {"offload_optimizer": "cpu"}}, f"{ZERO}.offload_optimizer is 'cpu', but must be a mapping of keys"),
        (
            {"tensorboard": {"output_path": 3}},
            "tensorboard.output_path is 3, but DeepSpeed's rule is: Input should be a valid string",
        ),
        (
            {"comms_logger": {"prof_ops": 3}},
            "comms_logger.prof_ops is 3, but DeepSpeed's rule is: Input should be a valid list",
        ),
        (
            {"gradient_clipping": float("nan")},
            "gradient_clipping is nan, but DeepSpeed's rule is: Input should be a finite",
        ),
        (
            {"communication_data_type": "int8"},
            "communication_data_type is 'int8', but DeepSpeed's rule is: Input should be 'fp32'",
        ),
        ({"optimizer": {"params": {}}}, "optimizer.type is None, but must name one"),
        ({"scheduler": {"type": "auto"}}, "scheduler.type is 'auto', but must name one"),
        ({"optimizer": {"type": "AdamV"}}, "optimizer.type is 'AdamV', which neither DeepSpeed nor torch has"),
        (
            {"scheduler": {"type": "WarmupDecay"}},
            "which neither DeepSpeed nor torch has: the nearest is 'WarmupDecayLR'",
        ),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params is [], but must be a mapping"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}},
            "clipping is the Trainer's. Set gradient_clip_val",
        ),
        ({"optimizer": {"type": "Muon", "params": {"momentm": 0.9}}}, "params.momentm is no hyperparameter of Muon's"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": -1e-3, "betas": "auto"}}},
            "optimizer.params is {'lr': -0.001}, which torch's AdamW refuses: Invalid learning rate: -0.001. Correct",
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentum": "-1"}}}, "SGD refuses: Invalid momentum value: -1"),
        ({"optimizer": {"type": "Lion", "params": {"betas": [0.9, 1.5]}}}, "AdamW refuses: Invalid beta parameter"),
        ({"optimizer": {"type": "adam", "params": {"betas": [0.9]}}}, "{'betas': [0.9]}, which torch's AdamW refuses"),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": -1}}}, "muon_lr is -1, but a learning rate must be 0"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, -0.1]}}},
            "scheduler.params.cycle_min_lr is [0.1, -0.1], but a learning rate must be 0 or more",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
            "scheduler.params.warmup_type is 'cosine', but must be log or linear",
        ),
        ({1: 2}, "1 is no key of DeepSpeed's"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16 is given twice, as {'enabled': True} and"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is false, but the strategy sets it"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last is true, but the Trainer has its own dataloader"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is true, but DeepCompile needs"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam', which neither DeepSpeed"),
        (
            {ZERO: {"stage": 3}, "torch_autocast": {"enabled": True}},
            "torch_autocast.enabled is true with stage 3, which gathers in torch_autocast.dtype. Set it too",
        ),
        ({"steps_per_print": 0}, "steps_per_print is 0, but DeepSpeed's rule is: Input should be greater"),
        ({"log_level": "loud"}, "log_level is 'loud', but DeepSpeed's rule is: Input should be 'debug'"),
        ({ZERO: {"allgather_bucket_size": 3}}, "allgather_bucket_size is 3, but DeepSpeed's must be even"),
        ({ZERO: {"legacy_stage1": True}}, f"{ZERO}.legacy_stage1 is true, but DeepSpeed has it no more. Remove it"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal is true, but checkpoints are this"),
    ],
)
def test_values_that_can_not_be_used(config: dict[str, Any], text: str) -> None:
    assert text in refusal(config)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is no key of DeepSpeed's: the nearest is 'zero_optimization'"),
        ({"fp16": {"enabeld": True}}, "fp16.enabeld is no key of DeepSpeed's: the nearest is 'enabled'"),
        ({ZERO: {"max_live_params": 1}}, "max_live_params is no key of DeepSpeed's: the nearest is 'stage3_max_live_p"),
        (
            {ZERO: {"offload_param": {"devise": "cpu"}}},
            f"{ZERO}.offload_param.devise is no key of DeepSpeed's: the near",
        ),
        ({"aio": {"blocks": 1}}, "aio.blocks is no key of DeepSpeed's: the nearest is 'block_size'"),
        ({"checkpoint": {"writer": {"kind": "fast"}}}, "checkpoint.writer.kind is no key of DeepSpeed's: "),
        ({"timers": {"throughput": {"on": True}}}, "timers.throughput.on is no key of DeepSpeed's: known are enabled"),
        ({"activation_checkpointing": {"partitioned_activations": True}}, "the nearest is 'partition_activations'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "the nearest is 'grad_accum_dtype'"),
        ({"comms_logger": {"enable": True}}, "comms_logger.enable is no key of DeepSpeed's: the nearest is 'enabled'"),
    ],
)
def test_unknown_keys_name_the_nearest(config: dict[str, Any], text: str) -> None:
    assert text in refusal(config)


def test_all_problems_are_in_one_error() -> None:
    text = refusal({"fp16": {"enabeld": 1}, ZERO: {"stage": 3, "overlap_comm": "maybe"}, "gradient_clip": 1}, stage=2)
    assert text.startswith("The DeepSpeed configuration can't be used, in 4 places:\n  - ")
    for part in ("fp16.enabeld", "overlap_comm is 'maybe'", "gradient_clip is no key", "stage is 2, but config's"):
        assert part in text


@pytest.mark.parametrize("key", ["mics_shard_size", "mics_hierarchical_params_gather"])
def test_mics_is_named_as_removed(key: str) -> None:
    text = refusal({ZERO: {"stage": 3, key: 4}})
    assert f"{ZERO}.{key} is 4, but DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid" in text
    # -1 and false were the values of a file that did not use it.
    settings_of(DeepSpeedFields(config={ZERO: {"mics_shard_size": -1, key: False}}), aligned=True)


@pytest.mark.parametrize("key", [*keys.REMOVED, *keys.FOREIGN])
def test_sections_without_a_place_here_are_refused_unless_they_are_off(key: str) -> None:
    assert f"{key} can't be used: " in refusal({key: {"enabled": True}})
    for off in (None, False, {}, {"enabled": False}, {"enabled": "false", "other": 1}, {"enabled": "auto"}):
        fields = DeepSpeedFields(config={key: off})
        settings_of(fields, aligned=True)
        assert key not in configured(fields, run_facts())


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_parallel_size", 1), ("data_parallel_size", 1), ("tensor_parallel", {"autotp_size": 1})],
)
def test_axes_of_size_1_are_no_axes(key: str, value: Any) -> None:
    settings_of(DeepSpeedFields(config={key: value}), aligned=True)
    larger = {"autotp_size": 2} if isinstance(value, dict) else 2
    assert f"{key} can't be used: " in refusal({key: larger})


@pytest.mark.parametrize("name", ["ds.json", "ds.conf", "ds"])
def test_json_is_read_by_whatever_name_the_file_has(tmp_path: Path, name: str) -> None:
    # YAML takes no tabs.
    (tmp_path / name).write_text('\n{\n\t"zero_optimization": {\n\t\t"stage": 1\n\t}\n}\n')
    assert reading.read_config(str(tmp_path / name)) == {"zero_optimization": {"stage": 1}}


_COMMENTED = """%s
{
    # DeepSpeed reads its file by hjson
    "zero_optimization": {"stage": 1, /* and this */ },  // the last comma too
    "train_batch_size": 8,
    "steps_per_print": 2e3,
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95,], "lr": 1e-4}},
}
"""


@pytest.mark.parametrize(("name", "first"), [("ds.json", "# ours"), ("ds.conf", "// ours"), ("ds", "/* ours */")])
def test_a_file_is_read_as_deepspeed_reads_it(tmp_path: Path, name: str, first: str) -> None:
    path = tmp_path / name
    path.write_text(_COMMENTED % first)
    assert reading.read_config(str(path)) == DeepSpeedConfig(str(path))._param_dict


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert f"config {str(missing)!r}: there is no such file" in refusal(str(missing))
    for content, text in (
        ('{"fp16": {', "can't be read as JSON: Bad key name (eof)"),
        ("", " is empty, but must hold a mapping"),
        ("[1]", " holds a list, but must hold a mapping"),
        ('{"fp16": {}, "fp16": {}}', "can't be read as JSON: the key 'fp16' is there twice. Remove one"),
    ):
        path = tmp_path / "ds.json"
        path.write_text(content)
        assert text in refusal(str(path))
    assert "config is 3, of type int. Give the path" in refusal(3)  # type: ignore[arg-type]

"""Values and keys of a DeepSpeed file: which are understood and which are refused, and how files are read."""

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


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled is 'maybe', but DeepSpeed's rule is: Input should be a valid b"),
        ({"fp16": {"hysteresis": 1.5}}, "fp16.hysteresis is 1.5, but DeepSpeed's rule is: Input should be a valid int"),
        ({ZERO: {"reduce_bucket_size": "5e-1"}}, f"{ZERO}.reduce_bucket_size is 0.5, but DeepSpeed's rule is: Input"),
        ({ZERO: 2}, f"{ZERO} is 2, but DeepSpeed's rule is: Input should be a valid dictionary"),
        ({ZERO: {"stage": 3, "compute_grad_norm": False}}, "compute_grad_norm=false is supported only with ZeRO Stage"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan, but DeepSpeed's rule is: Input should be a"),
        ({"optimizer": {"params": {}}}, "optimizer.type is 'auto', which neither DeepSpeed nor torch has"),
        ({"scheduler": {"type": "WarmupDecay"}}, "scheduler.type is 'WarmupDecay', which neither DeepSpeed nor torch"),
        ({"optimizer": {"type": "Muon", "params": {"momentm": 0.9}}}, "Muon has no momentm: known are lr"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is false, but the strategy sets it"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last is true, but the Trainer has its own dataloader"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile is true, but DeepCompile needs"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal is true, but checkpoints are this"),
        ({ZERO: {"stage": 3}, "torch_autocast": {"enabled": True}}, "torch_autocast.enabled is true with stage 3"),
        # Unknown keys.
        ({1: 2}, "1 is no key of DeepSpeed's"),
        ({"zero_optimisation": {}}, "zero_optimisation is no key of DeepSpeed's: the nearest is 'zero_optimization'"),
        ({"data_types": {"grad_acum_dtype": "fp32"}}, "the nearest is 'grad_accum_dtype'"),
    ],
)
def test_values_and_keys_that_can_not_be_used(config: dict[str, Any], text: str) -> None:
    assert text in refusal(config)


def test_all_problems_are_in_one_error() -> None:
    text = refusal({"fp16": {"enabeld": 1}, ZERO: {"stage": 3, "overlap_comm": "maybe"}, "gradient_clip": 1})
    assert text.startswith("The DeepSpeed configuration can't be used, in 3 places:\n  - ")
    for part in ("fp16.enabeld", "overlap_comm is 'maybe'", "gradient_clip is no key"):
        assert part in text


def test_mics_is_named_as_removed() -> None:
    text = refusal({ZERO: {"stage": 3, "mics_shard_size": 4}})
    assert f"{ZERO}.mics_shard_size is 4, but DeepSpeed 0.19 removed MiCS: use shard_fsdp_hybrid" in text
    # -1 and false were the values of a file that did not use it.
    off = {"mics_shard_size": -1, "mics_hierarchical_params_gather": False}
    settings_of(DeepSpeedFields(config={ZERO: off}), aligned=True)


@pytest.mark.parametrize("key", [*keys.REMOVED, *keys.FOREIGN])
def test_sections_without_a_place_here_are_refused_unless_they_are_off(key: str) -> None:
    assert f"{key} can't be used: " in refusal({key: {"enabled": True}})
    for off in (None, False, {}, {"enabled": "false", "other": 1}, {"enabled": "auto"}):
        fields = DeepSpeedFields(config={key: off})
        settings_of(fields, aligned=True)
        assert key not in configured(fields, run_facts())


_COMMENTED = """%s
{
\t# DeepSpeed reads its file by hjson, and YAML takes no tabs.
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
    assert "config is 3, but must be the path of a file" in refusal(3)  # type: ignore[arg-type]

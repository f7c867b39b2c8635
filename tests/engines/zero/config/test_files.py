"""DeepSpeed files as people have them: what is read from them, and that DeepSpeed takes what is made of them."""

from __future__ import annotations

import json

import pytest

from lightning_shard.engines.zero.config.fields import DeepSpeedFields
from lightning_shard.precision.loss_scale import LossScaling
from tests.engines.zero.config.support import FILES, ZERO, accepted, configured, loss_scaling, run_facts, settings_of


def test_a_zero_2_file_with_auto_values() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero2_fp16_auto.json"))
    settings_of(fields, aligned=True)
    assert loss_scaling(fields.config) == LossScaling(initial=65536, growth_interval=1000, hysteresis=2)
    facts = run_facts("16-mixed", world_size=4, accumulate_grad_batches=3, gradient_clip_val=1.0)
    config = configured(fields, facts)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (24, 2)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (3, 0.0)
    assert config["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.05}
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 1,
        "total_num_steps": 500,
    }
    assert config["fp16"] == {"enabled": True, "loss_scale": 1.0, "fp16_master_weights_and_grads": False}
    assert "bf16" not in config
    # What a file says outright stays, larger than the model or not.
    assert config[ZERO]["reduce_bucket_size"] == config[ZERO]["allgather_bucket_size"] == 200_000_000
    assert "auto" not in json.dumps(config, sort_keys=True)


def test_a_file_whose_values_are_strings() -> None:
    fields = DeepSpeedFields(config=str(FILES / "zero1_strings.json"))
    settings_of(fields, aligned=True)
    facts = run_facts(
        world_size=2, micro_batch_size=4, accumulate_grad_batches=2, gradient_clip_val=1.0, optimizer=None
    )
    config = configured(fields, facts)
    assert config["bf16"]["enabled"] is True
    assert config["optimizer"] == {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "torch_adam": True}}
    # On a CPU nothing is copied to page-locked memory.
    assert config[ZERO]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert (config[ZERO]["stage"], config[ZERO]["reduce_bucket_size"]) == (1, 500_000_000)
    assert config[ZERO]["overlap_comm"] is False
    assert config["activation_checkpointing"]["partition_activations"] is False
    assert config["flops_profiler"]["enabled"] is False
    # Infinity, for never, is nothing that JSON has; a section of a removed feature that is off asks for nothing.
    assert not {"steps_per_print", "amp", "bfloat16", "cpu_offload"} & {*config, *config[ZERO]}
    # Sections of DeepSpeed's own logging pass as they are.
    assert config["wandb"] == {"enabled": False, "project": "my_project"}


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("zero[1-3]*.json")))
def test_deepspeed_takes_every_file(name: str) -> None:
    content = json.loads((FILES / name).read_text())
    given = {k: v for k, v in content.items() if "batch" not in k and "gradient" not in k and k != "optimizer"}
    before = json.dumps(given)
    fields = DeepSpeedFields(config=given)
    taken = accepted(configured(fields, run_facts("bf16-mixed")))
    assert taken.train_batch_size == 2
    assert taken.zero_optimization_stage == int(name[4])
    assert json.dumps(given) == before

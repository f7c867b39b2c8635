"""Build the final configuration: settings with "auto" replaced by values of the run, and this package's pins."""

import copy
import json
from typing import Any

from lightning_shard.engines.zero.config.fields import RunFacts
from lightning_shard.engines.zero.config.reading import AUTO, set_value, value_at
from lightning_shard.engines.zero.config.zero_settings import CONTRACT, ZERO, ZeroSettings, check_policy
from lightning_shard.errors import raise_problems
from lightning_shard.precision.policy import short

CONTRADICTS = 'The DeepSpeed configuration contradicts the run. Write "auto" for a value of the Trainer, or remove it'

BUCKET = 500_000_000  # DeepSpeed's default for both buckets, in elements.

OVERLAPPED = 200_000_000  # For stages 1 and 2, whose overlap keeps two buckets at a time. As in stock Lightning.

NVME_BUFFER = 100_000_000  # DeepSpeed's default for one buffer of parameters from NVMe, in elements.


def deepspeed_config(settings: ZeroSettings, facts: RunFacts) -> dict[str, Any]:
    """Build the argument of ``deepspeed.initialize(config=...)``: plain JSON, the same on every rank and in every call.
    ConfigurationError lists all values that contradict the run. PrecisionError: see `check_policy`.
    """
    problems: list[str] = []
    config = copy.deepcopy(dict(settings.merged))
    check_policy(settings, facts)
    _set_batch_sizes(config, facts, problems)
    _check_clipping(config, facts, problems)
    _set_precision(config, facts, problems)
    _resolve_sections(config, facts, problems)
    _set_zero_options(config, facts)
    raise_problems(problems, CONTRADICTS)
    # By default DeepSpeed waits for the device twice in each micro-batch, to log a throughput (utils/timer.py).
    config.setdefault("timers", {"throughput": {"enabled": False}})
    if facts.aligned:
        # Written out, to depend on no default of DeepSpeed.
        for path, (allowed, _) in CONTRACT.items():
            section = path.rpartition(".")[0]
            if allowed and (section in ("", ZERO) or value_at(config, section) is not None) and path not in _BY_POLICY:
                set_value(config, path, allowed[0])
    config["managed_gradient_accumulation"] = True
    config.pop("checkpoint", None)  # Checkpoints are this package's own. This writer needs DeepSpeed's launcher.
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    plain: dict[str, Any] = json.loads(json.dumps(_drop_auto(config), sort_keys=True, allow_nan=False))
    return plain


_BY_POLICY = ("communication_data_type", "data_types.grad_accum_dtype")
"""Set by the policy already, in fp32 under aligned."""


def _drop_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Drop keys that are still "auto", so that DeepSpeed's default holds."""
    kept = {key: value for key, value in config.items() if value != AUTO}
    return {key: _drop_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _set_batch_sizes(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    """Set the three batch keys, whose product DeepSpeed checks. An unknown micro-batch counts as 1, in logs alone."""
    accumulate = facts.accumulate_grad_batches
    per_micro = accumulate * facts.ranks
    micro = facts.trainer.micro_batch_size
    micro_key, train_key = "train_micro_batch_size_per_gpu", "train_batch_size"
    if micro is None:
        given, whole = (None if config.get(key) == AUTO else config.get(key) for key in (micro_key, train_key))
        micro = given or (whole // per_micro if whole and whole % per_micro == 0 else 1)
    else:
        _check_equal(config, micro_key, micro, "the dataloader's batch size", problems)
    _check_equal(config, "gradient_accumulation_steps", accumulate, "the Trainer's accumulate_grad_batches", problems)
    product = f"{micro} per process x {accumulate} accumulated x {facts.ranks} processes"
    _check_equal(config, train_key, micro * per_micro, f"the run's, {product},", problems)
    config.update({micro_key: micro, train_key: micro * per_micro, "gradient_accumulation_steps": accumulate})


def _check_clipping(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    value, algorithm = facts.trainer.gradient_clip_val or 0.0, facts.trainer.gradient_clip_algorithm
    _check_equal(config, "gradient_clipping", value, "the Trainer's clipping", problems)
    if config.get("gradient_clipping") not in (None, AUTO, 0) and algorithm == "value":
        problems.append("gradient_clipping is by norm, but the Trainer's gradient_clip_algorithm is 'value'")
    config["gradient_clipping"] = 0.0


def _set_precision(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    """Set ``fp16``, ``bf16``, ``data_types`` and ``communication_data_type`` by the policy."""
    policy, compute = facts.policy, short(facts.policy.compute)
    low = policy.is_low_memory
    for section in ("fp16", "bf16"):
        whose = f"with the Trainer's precision, compute {compute} and masters {short(policy.master)}, it"
        _check_equal(config, f"{section}.enabled", compute == section, whose, problems)
        if section == compute:
            _check_equal(config, f"{section}.{section}_master_weights_and_grads", low, whose, problems)
    bf16 = config.pop("bf16", {})
    config.pop("fp16", None)
    if compute == "fp16":
        # 1.0 is a static scale without effect: this package scales the loss.
        config["fp16"] = {"enabled": True, "loss_scale": 1.0, "fp16_master_weights_and_grads": low}
    elif compute == "bf16":
        # Engines skip a step with inf or NaN only under a loss scale.
        config["bf16"] = {"check_grad_overflow": False, "bf16_optimizer_states": low, **bf16}
        config["bf16"].update(enabled=True, bf16_master_weights_and_grads=low)
    for path, dtype in (("data_types.grad_accum_dtype", policy.accumulate), ("communication_data_type", policy.reduce)):
        given = value_at(config, path)
        set_value(config, path, short(dtype) if given in (None, AUTO) else given)


def _set_zero_options(config: dict[str, Any], facts: RunFacts) -> None:
    zero = config[ZERO]
    hidden = facts.hidden_size
    if hidden is not None:
        # Hugging Face's formulas: transformers/integrations/deepspeed.py, trainer_config_finalize.
        by_hidden = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
        zero.update({key: value for key, value in by_hidden.items() if zero.get(key) == AUTO})
    # Buckets are allocated whole, 1 to 2 GB at DeepSpeed's defaults, however small the model. DeepSpeed asserts that
    # the all-gather bucket is even, for the alignment of 16-bit buffers.
    elements = facts.number_of_parameters or BUCKET
    elements += elements % 2
    bucket = OVERLAPPED if zero["stage"] < 3 else BUCKET
    if zero["stage"] < 3 and facts.device_type != "cpu" and zero.get("overlap_comm", AUTO) == AUTO:
        # DeepSpeed's ``BF16_Optimizer``, stage 1 in bf16 without offload, reduces after backward.
        zero["overlap_comm"] = (
            zero["stage"] == 2 or short(facts.policy.compute) != "bf16" or "offload_optimizer" in zero
        )
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(key, AUTO) == AUTO:
            zero[key] = min(bucket, elements)
    parameters = zero.get("offload_param", {})
    if parameters.get("device") == "nvme" and parameters.get("buffer_size", AUTO) == AUTO:
        parameters["buffer_size"] = min(NVME_BUFFER, elements)
    zero.setdefault("ignore_unused_parameters", True)
    zero.pop("compute_grad_norm", None)  # DeepSpeed computes none here, and refuses the key in stage 1 in bf16.
    for key in ("offload_optimizer", "offload_param"):
        if facts.device_type == "cpu" and key in zero and zero[key].get("pin_memory", AUTO) == AUTO:
            zero[key]["pin_memory"] = False


def _check_equal(config: dict[str, Any], path: str, value: Any, whose: str, problems: list[str]) -> None:
    """Append a problem if ``config`` has another value at ``path`` than the run, unless it is unset or "auto"."""
    given = value_at(config, path)
    if given not in (None, AUTO) and given != value:
        problems.append(f"{path} is {given!r}, but {whose} is {value!r}")


def _fill_auto(config: dict[str, Any], path: str, value: Any, whose: str, problems: list[str]) -> None:
    _check_equal(config, path, value, whose, problems)
    if value_at(config, path) == AUTO:
        set_value(config, path, value)


def _resolve_sections(config: dict[str, Any], facts: RunFacts, problems: list[str]) -> None:
    """Replace the "auto" values of both sections in place. Numbers that differ from the run's are problems."""
    known = {k: list(v) if isinstance(v, tuple) else v for k, v in (facts.optimizer or {}).items() if v is not None}
    if "optimizer" in config:
        _resolve_optimizer(config, known, problems)
        _choose_adam(config["optimizer"], facts)
    if "scheduler" in config:
        _resolve_scheduler(config, facts, known, problems)


def _resolve_optimizer(config: dict[str, Any], known: dict[str, Any], problems: list[str]) -> None:
    kind, existing = config["optimizer"]["type"], known.get("type")
    # DeepSpeed's Adam is AdamW too, unless ``adam_w_mode`` is off.
    word = "adam" if kind.lower() == "adamw" else kind.lower()
    if existing is not None and word not in existing.lower():
        problems.append(f"optimizer.type is {kind!r}, but configure_optimizers returns {existing}: remove one of both")
    for key in ("lr", "betas", "eps", "weight_decay"):
        if key in known:
            _fill_auto(config, f"optimizer.params.{key}", known[key], "the optimizer's", problems)
    if value_at(config, "optimizer.params.lr") == AUTO:
        problems.append("optimizer.params.lr is 'auto', but no learning rate is known: write a number")


def _choose_adam(section: dict[str, Any], facts: RunFacts) -> None:
    """Choose between DeepSpeed's three Adams unless the section does. Those that are not torch's round otherwise."""
    if section["type"].lower() not in ("adam", "adamw"):
        return
    params = section["params"]
    if facts.aligned and params.get("bias_correction", True) in (True, AUTO):
        # torch's AdamW has no such argument, and always corrects.
        params.pop("bias_correction", None)
        params.setdefault("torch_adam", True)
    if facts.policy.is_low_memory and not params.get("torch_adam"):
        params.setdefault("fp32_optimizer_states", False)


def _resolve_scheduler(config: dict[str, Any], facts: RunFacts, known: dict[str, Any], problems: list[str]) -> None:
    rate = known.get("lr", value_at(config, "optimizer.params.lr"))
    # DeepSpeed refuses 0 warm-up steps, Hugging Face's default.
    for key, least in (("warmup_num_steps", 1), ("warmup_min_lr", 0)):
        if value_at(config, f"scheduler.params.{key}") == AUTO:
            set_value(config, f"scheduler.params.{key}", least)
    sources = {
        "total_num_steps": (facts.total_steps, "the Trainer's number of optimizer steps"),
        "warmup_max_lr": (None if rate == AUTO else rate, "the optimizer's learning rate"),
    }
    for key, (value, whose) in sources.items():
        path = f"scheduler.params.{key}"
        if value is not None:
            _fill_auto(config, path, value, whose, problems)
        elif value_at(config, path) == AUTO:
            problems.append(f"{path} is 'auto', but {whose} is not known: write a number")

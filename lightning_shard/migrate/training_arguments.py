"""Read ``TrainingArguments`` of Hugging Face's Trainer into neutral settings: sharding, precision and batches.

The rules come from ``transformers/training_args.py`` of 5.23. Accelerate's readers read the parts that it passes on.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from lightning_shard.engines.zero.config.reading import AUTO, read_config
from lightning_shard.migrate.accelerate import NOTES, read_mesh
from lightning_shard.migrate.deepspeed_json import read_deepspeed
from lightning_shard.migrate.fsdp_config import STRATEGIES, read_fsdp
from lightning_shard.migrate.neutral import Engine, Field, Reading, described, plain, shown

_SHARDING = tuple(map(str.lower, STRATEGIES))

PRECISIONS = {
    "bf16": "bf16-mixed", "fp16": "16-mixed", "pure_bf16": "bf16-true", "bfloat16": "bf16-true", "float16": "16-true",
}  # fmt: skip
"""Flag to precision. The last three are LLaMA-Factory's and axolotl's, for training in 16 bits alone."""

FIELDS = described("training_arguments")


def read_training_arguments(reading: Reading, content: Mapping[str, Any]) -> None:
    content = dict(content)
    # axolotl may have a fsdp_version alone.
    fsdp = content.get("fsdp") or ("full_shard" if content.get("fsdp_version") else ())
    fsdp, deepspeed = "full_shard" if fsdp is True else fsdp, content.get("deepspeed")
    options = fsdp.split() if isinstance(fsdp, str) else list(map(str, fsdp))
    engine: Engine = "deepspeed" if deepspeed else "fsdp" if options else "ddp"
    reading.engine = engine
    field = "deepspeed" if deepspeed else "fsdp"
    reading.ask("engine", engine, field, shown(content.get(field)) if deepspeed or options else None)
    if deepspeed and options:
        reading.problems.append("fsdp and deepspeed are both given, but the Trainer takes one: remove the other")
    elif deepspeed:
        read_deepspeed(reading, read_config(deepspeed, "deepspeed"), "deepspeed: ", clips=False)
    elif options:
        config = read_config(content.get("fsdp_config") or {}, "fsdp_config")
        _read_fsdp_options(reading, options, {"fsdp_version": content.get("fsdp_version") or 1, **config})
    if isinstance(content.get("parallelism_config"), Mapping):
        read_mesh(reading, content["parallelism_config"])
    if str(content.get("gradient_checkpointing")).startswith("offload"):  # axolotl's
        reading.ask("activation_checkpointing", "offload", "gradient_checkpointing", content["gradient_checkpointing"])
        content["gradient_checkpointing"] = None
    if str(content.get("max_steps")).isdecimal() and content.get("num_train_epochs") is not None:
        reading.meet("num_train_epochs", content.pop("num_train_epochs"), "max_steps is given, which overrides it")
    reading.read_fields("", FIELDS, {"max_grad_norm": 1.0, **content})
    _read_precision(reading, content, engine)
    others = sorted(str(name) for name in content if name not in FIELDS)
    for name in others:
        for near in difflib.get_close_matches(name, FIELDS, 1, 0.9):
            reading.problems.append(f"{name} is no field of TrainingArguments: the nearest is {near!r}")
    reading.others += others


def _read_precision(reading: Reading, content: Mapping[str, Any], engine: Engine) -> None:
    given = {}
    for name, precision in PRECISIONS.items():
        # axolotl's auto is true on a device with bf16.
        value = {AUTO: name == "bf16", "full": True}.get(str(content.get(name)), content.get(name))
        if reading.read_field(name, Field(words={True: True, False: False}), value):
            given[name] = "bf16-true" if content[name] == "full" else precision
    if len(set(given.values())) > 1:
        reading.problems.append(f"{' and '.join(given)} are both true: set one of them")
    name, precision = next(iter(given.items()), ("bf16, fp16", "32-true"))
    reading.ask("precision", precision, name, content.get(name), NOTES[engine] * precision.endswith("mixed"))


def _read_fsdp_options(reading: Reading, options: list[str], config: dict[str, Any]) -> None:
    """Turn the options into keys of Accelerate's ``fsdp_config``, as the Trainer does."""
    for word in {*options} - {*_SHARDING, "offload", "auto_wrap"}:
        reading.problems.append(f"fsdp has {word!r}, but its words are {', '.join(_SHARDING)}, offload, auto_wrap")
    section = {str(key).removeprefix("fsdp_"): value for key, value in config.items() if not str(key).startswith("xla")}
    kind = next((word.upper() for word in options if word in _SHARDING), "FULL_SHARD")
    if plain(section["version"]) == 1:
        section.setdefault("sharding_strategy", kind)
        section.pop("reshard_after_forward", None)
    else:
        section.setdefault("reshard_after_forward", kind != "SHARD_GRAD_OP")
    if "offload" in options:
        section["offload_params"] = True
    if "auto_wrap" in options:
        section["auto_wrap_policy"] = "SIZE_BASED_WRAP" if section.get("min_num_params") else "TRANSFORMER_BASED_WRAP"
    section.pop("limit_all_gathers", None)  # FSDP2 always does
    read_fsdp(reading, section)

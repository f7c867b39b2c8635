"""The tables of keys, against the installed DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime import config as library

from lightning_shard.engines.zero.config import keys
from lightning_shard.errors import ConfigurationError
from lightning_shard.registry import build


class _Recorder(dict[str, Any]):
    """A configuration that remembers which keys DeepSpeed asks it for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Recorder:
        return self


def _asked_for(**content: Any) -> set[str]:
    recorder = _Recorder({"train_batch_size": 1, **content})
    library.DeepSpeedConfig(recorder)
    return recorder.asked


def test_the_table_of_keys_is_deepspeeds() -> None:
    known = {*keys.names_of(keys.configuration()), *keys.FOREIGN, *keys.REMOVED}
    # Read by deepspeed.initialize before it makes this object, or only where processes are grouped.
    elsewhere = {"data_parallel_size", "sequence_parallel_size"}
    assert _asked_for() == known - elsewhere


@pytest.mark.parametrize(
    "name",
    ["activation_checkpointing", "aio", "flops_profiler", "data_types", "torch_autocast", "optimizer"],
)
def test_the_tables_of_sections_are_deepspeeds(name: str) -> None:
    base = {"optimizer": {"type": "x"}, "torch_autocast": {"dtype": "bf16"}}.get(name, {})
    section = _Recorder(base)
    _asked_for(**{name: section})
    assert section.asked == set(keys.UNMODELLED[name])


def test_removed_keys_are_deepspeeds() -> None:
    # Private tables: the public way, an error for each key, can't list them.
    assert set(keys.REMOVED) == set(library._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(keys.REMOVED_ZERO) == set(library._REMOVED_ZERO_CONFIG_KEYS)


def test_stage_3_compiles_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"compile is true with stage 3.*Use shard_fsdp"):
        build("shard_deepspeed_stage_3_aligned", compile=True)
    assert build("shard_deepspeed_stage_2", compile=True).compile

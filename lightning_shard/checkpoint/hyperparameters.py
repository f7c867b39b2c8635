"""Hyperparameters as plain values, so that a checkpoint's reader imports and runs nothing."""

import argparse
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from lightning_shard.checkpoint.files.trainer_state import can_be_saved

KEYS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Lightning's keys in a checkpoint: of hyperparameters, to the key of their class if that is OmegaConf's."""


def plain_hyperparameters(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace hyperparameters in a checkpoint of Lightning by plain values.

    OmegaConf's configurations and namespaces become containers, paths and enums text. Returned: a shallow copy of the
    checkpoint, and the names of values that are left out because they can't be saved (modules, partials, functions).
    """
    plain, left_out = dict(checkpoint), list[str]()
    for key, kind in KEYS.items():
        if key in plain:
            values = {name: _plain(value) for name, value in dict(plain[key]).items()}
            left_out += [str(name) for name, value in values.items() if not can_be_saved(value)]
            plain[key] = {name: value for name, value in values.items() if str(name) not in left_out}
            plain.pop(kind, None)
    return plain, left_out


def _plain(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        return _plain(OmegaConf.to_container(value, resolve=True))
    if isinstance(value, argparse.Namespace):
        return _plain(vars(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(each) for each in value)
    return value

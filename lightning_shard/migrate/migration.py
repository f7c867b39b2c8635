"""Files in, one configuration out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigurationError
from lightning_shard.migrate import report
from lightning_shard.migrate.accelerate import read_accelerate
from lightning_shard.migrate.deepspeed_json import read_deepspeed
from lightning_shard.migrate.files import format_of, read_file
from lightning_shard.migrate.lightning_yaml import Known, merged, read_lightning
from lightning_shard.migrate.neutral import Became, Lost, Reading
from lightning_shard.migrate.shard_strategies import OWN_ENGINES
from lightning_shard.migrate.target import CLASSES, Target
from lightning_shard.migrate.translation import build


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What came of it."""

    content: dict[str, Any]  # What ``lightning-shard fit --config`` reads.
    rows: list[Became]  # What became what.
    idle: list[str]  # Fields that ask for nothing.
    lost: list[Lost]  # Fields without a counterpart.
    launch: dict[str, str]  # Variables that the launcher was told in the source.


def migrate(paths: Sequence[Path], known: Known, to: str | None = None) -> Migration:
    """Read the files, and put them together for one engine.

    Several Lightning YAMLs are laid over one another, as with ``--config``; an Accelerate config file or a DeepSpeed
    file among them says the strategy.

    Args:
        paths: of the files.
        known: what Lightning and the table of strategy names know.
        to: name of the strategy to write for; None: the source's own engine.

    Raises:
        ConfigurationError: everything that is wrong with the files, in one message.
    """
    reading = _read(paths, known)
    if reading.problems or reading.engine is None:
        raise ConfigurationError(report.mistakes(reading.problems))
    if to is None:
        target = build(reading, reading.engine, None)
    else:
        class_path, arguments = known.presets[to]
        target = build(reading, OWN_ENGINES[class_path.rpartition(".")[2]], arguments)
    if target.problems:
        raise ConfigurationError(report.mistakes(target.problems))
    return Migration(
        content=_content(reading, target, known, _name(target, known)),
        rows=target.rows,
        idle=reading.idle,
        lost=target.lost,
        launch=reading.launch,
    )


def _read(paths: Sequence[Path], known: Known) -> Reading:
    reading = Reading()
    files = [(path, read_file(path)) for path in paths]
    formats = [format_of(path, content) for path, content in files]
    others = [path.name for (path, _), kind in zip(files, formats, strict=True) if kind != "lightning"]
    if len(others) > 1:
        raise ConfigurationError(
            f"{' and '.join(others)} each say the whole strategy: give one of them, beside any Lightning YAMLs. An "
            "Accelerate config file names its DeepSpeed file by deepspeed_config_file."
        )
    lightning: dict[str, Any] = {}
    for (path, content), kind in zip(files, formats, strict=True):
        if kind == "accelerate":
            read_accelerate(reading, content, path)
        elif kind == "deepspeed":
            reading.ask("engine", "deepspeed", path.name, "a DeepSpeed file")
            read_deepspeed(reading, content)
        else:
            lightning = merged(lightning, content)
    if lightning:
        read_lightning(reading, lightning, known)
    return reading


def _name(target: Target, known: Known) -> Any:
    """The strategy as YAML has it: a name where there is one for these very arguments."""
    path = CLASSES[target.engine]
    for name, (class_path, arguments) in known.presets.items():
        if class_path == path and dict(arguments) == target.arguments:
            return name
    return {"class_path": path, "init_args": target.arguments} if target.arguments else {"class_path": path}


def _content(reading: Reading, target: Target, known: Known, strategy: Any) -> dict[str, Any]:
    carried = dict(reading.carried)
    trainer: Mapping[str, Any] = carried.pop("trainer", {})
    first: dict[str, Any] = {key: target.trainer.pop(key) for key in ("precision", "plugins") if key in target.trainer}
    kept = {key: value for key, value in trainer.items() if key not in first}
    own: dict[str, Any] = {"strategy": strategy, **first, **kept, **target.trainer}
    before = [key for key in known.top_keys if key == "seed_everything" and key in carried]
    head = {key: carried.pop(key) for key in before}
    return {**head, "trainer": own, **carried}

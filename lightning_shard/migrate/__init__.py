"""Configurations of Accelerate, Hugging Face, DeepSpeed and stock Lightning as this package's YAML.

A contents page: a reader for each format (``accelerate.py``, ``training_arguments.py``, ``deepspeed_json.py``, and
``lightning_yaml.py`` with ``lightning_strategies.py`` for stock strategies) adds to one `Reading` what each field asks
for in neutral terms, by tables of fields; ``migration.py`` answers each by the table in ``counterparts.py`` and the
rules in ``dependent_settings.py``, and writes it down. A field without a counterpart is in `Reading.lost`, never
nowhere.
"""

from lightning_shard.migrate.lightning_yaml import Known
from lightning_shard.migrate.migration import Migration, migrate

__all__ = ["Known", "Migration", "migrate"]

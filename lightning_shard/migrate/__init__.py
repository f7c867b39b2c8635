"""Configurations of Accelerate, DeepSpeed and stock Lightning, and of other engines, as this package's YAML.

A contents page: a reader for each format (``accelerate.py``, ``deepspeed_json.py``, ``lightning_yaml.py`` with
``stock.py`` and ``own.py``) adds to one `Reading` what each field asks for in neutral terms; ``building.py`` answers
each by the table in ``equivalents.py`` and the rules in ``together.py``; ``report.py`` writes it down. A field that
becomes nothing is in `Reading.lost`, never nowhere.
"""

from lightning_shard.migrate.lightning_yaml import Known
from lightning_shard.migrate.migration import Migration, migrate

__all__ = ["Known", "Migration", "migrate"]

"""Turn configurations of Accelerate, Hugging Face, DeepSpeed and stock Lightning into this package's YAML.

Each source has a reader, which adds neutral settings to one `Reading`. ``migration.py`` writes these for one engine, by
``counterparts.py`` and ``dependent_settings.py``. Every field without a counterpart is in `Reading.lost`.
"""

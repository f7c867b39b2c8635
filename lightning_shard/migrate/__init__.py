"""Configurations of Accelerate, Hugging Face, DeepSpeed and stock Lightning as this package's YAML.

A reader for each format adds to one `Reading` what each field asks for in neutral terms; ``migration.py`` answers by
``counterparts.py`` and ``dependent_settings.py``. A field without a counterpart is in `Reading.lost`, never nowhere.
"""

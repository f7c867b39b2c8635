"""Configurations of Accelerate, Hugging Face, DeepSpeed and stock Lightning as this package's YAML. A reader for each
adds what fields ask for, in neutral terms, to one `Reading`, which ``migration.py`` answers by ``counterparts.py`` and
``dependent_settings.py``. A field without a counterpart is in `Reading.lost`, never nowhere.
"""

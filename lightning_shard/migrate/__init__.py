"""Turn configurations of Accelerate, Hugging Face, DeepSpeed and stock Lightning into this package's YAML.

Each source has a reader, which adds settings to one `Reading` by the rows of ``fields.yaml``. ``counterparts.py``
writes them for one engine. Every field without a counterpart is in `Reading.lost`.
"""

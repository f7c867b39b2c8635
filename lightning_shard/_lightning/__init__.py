"""Everything that this package uses of Lightning's private names, and all that it replaces on live Lightning objects.

One module for each subject. A name that another version of Lightning lacks fails on import (``names.py``), and not in a
training step. What is replaced, on what and why is the table in ``replaced.py``; every function that replaces something
takes the run's `Replacements`, which put it back when the run ends.
"""

# Its names are required whichever of the modules is imported.
from lightning_shard._lightning import names  # noqa: F401

"""Parts of a run. Each is built and tested without a Trainer, and a strategy's hooks call them in order."""

# The imports are the contents.
# ruff: noqa: F401

from lightning_shard.engines.freezing import FreezingCheck
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.run import fit
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.data import Data, Predictions
from lightning_shard.run.dtype_ledger import DtypeLedger
from lightning_shard.run.nonfinite import warn_of_nonfinite
from lightning_shard.run.preemption_save import Preemption, RunIdentity
from lightning_shard.run.process_group import Processes, RunWatch, count_run, device_of, launch_of, nodes_started
from lightning_shard.run.run_memory import RunMemory

"""The parts of a run, each of which is built and tested without a Trainer; a strategy's hooks call them in order."""

# The imports are the contents.
# ruff: noqa: F401

from lightning_shard.engines.freezing import Freezing
from lightning_shard.engines.replicated import SharedBuffers
from lightning_shard.run import fit
from lightning_shard.run.checkpoints import Checkpoints
from lightning_shard.run.data import Data, Predictions
from lightning_shard.run.ledger import FitLedger, RunLedger
from lightning_shard.run.memory import Memory
from lightning_shard.run.nonfinite import warn_of_nonfinite
from lightning_shard.run.preemption import Preemption, RunIdentity
from lightning_shard.run.processes import Processes, RunWatch, device_of, launch_of, next_run, nodes_started
from lightning_shard.run.untested import check_untested_versions

"""The ledger: what dtype everything in a run *is*, read from live tensors, hooks and collectives of its first step.

Nothing in it comes from the configuration. `Recorder` fills it, `violations` holds it against the contract.
"""

from lightning_shard.precision.ledger.record import Entry, Ledger, Reduction, Violation, contract_error, violations
from lightning_shard.precision.ledger.recorder import Recorder

__all__ = ["Entry", "Ledger", "Recorder", "Reduction", "Violation", "contract_error", "violations"]

"""The ledger: what dtype everything in a run *is*, read from live tensors, hooks and collectives of its first step.

Nothing in it comes from the configuration. `Recorder` fills it, `violations` holds it against the contract.
"""

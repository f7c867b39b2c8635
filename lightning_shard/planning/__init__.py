"""What a run will need, before it runs: bytes per rank, bytes over the network and time, by arithmetic and by tracing.

A contents page: `facts` is what is known of a model, an engine and an optimizer; `states` turns it into bytes per rank.
"""

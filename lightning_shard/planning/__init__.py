"""What a run will need, before it runs: bytes per rank, bytes over the network and time, without Lightning."""

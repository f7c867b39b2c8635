"""``lightning-shard`` and ``python -m lightning_shard``."""

from __future__ import annotations

from lightning_shard.cli import main

if __name__ == "__main__":
    main()

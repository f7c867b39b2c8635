"""``lightning-shard`` and ``python -m lightning_shard``."""

import signal
import sys
from pathlib import Path

from lightning_shard import commands, registry


def main() -> None:
    """Run the command line of this process."""
    if sys.argv[1:2] == ["fit"]:
        # Hold back signals to stop until the run handles them: before, they would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    script = Path(sys.argv[0]).name
    program = "python -m lightning_shard" if script == "__main__.py" else script
    code = commands.run_quick(program, sys.argv[1:])
    if code is not None:
        raise SystemExit(code)
    registry.register()
    from lightning_shard.commands.cli import ShardCLI

    ShardCLI(parser_kwargs={"prog": program, "description": "Train with sharded strategies."})


if __name__ == "__main__":
    main()

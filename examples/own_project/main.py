"""``python main.py fit --config run.yaml``."""

from digits.data import Digits
from digits.model import Classifier

from lightning_shard import ShardCLI

if __name__ == "__main__":
    ShardCLI(Classifier, Digits)

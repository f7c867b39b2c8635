"""The table of what is equal on which engine: measured cell by cell, in processes that stay.

    python -m tests.equality.table --ranks 2 4 --results results.json --write examples/guides/equality.md

A cell is one fit of four steps by its strategy, compared with ``shard_ddp_aligned`` in the same precision: 32-true for
the plain names, bf16-mixed for the aligned ones. Cells that are in the file of results are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_shard import ConfigurationError
from lightning_shard.registry import PRESETS, build
from tests.equality.modules import LENGTH, MODULES, VOCAB, Model
from tests.harness import DistributedError, run_distributed
from tests.models import Final, quiet_trainer
from tests.optimizers import Lamb

EQUAL, ORDER = "=", "≈"
BASE = "shard_ddp_aligned"
# fp32 sums in another order, in bf16 rounded once more to 8 bits; AdamW's steps are of 1e-2, whatever the gradient.
# Where that is too little, `_by_order` measures what the order of sums does.
TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 2e-2}

Make = Callable[[Any], torch.optim.Optimizer]


def _from(package: str, name: str, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return getattr(importlib.import_module(package), name)(parameters, **settings)


OPTIMIZERS: dict[str, tuple[str, Make]] = {
    "AdamW": ("torch", functools.partial(torch.optim.AdamW, lr=1e-2)),
    "SGD": ("torch", functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9)),
    "Adafactor": ("torch", functools.partial(torch.optim.Adafactor, lr=1e-2)),
    "Muon": ("torch", functools.partial(torch.optim.Muon, lr=1e-2)),
    "LAMB": ("torch", functools.partial(Lamb, lr=1e-2)),
    "SOAP": ("pytorch_optimizer", functools.partial(_from, "pytorch_optimizer", "SOAP", lr=1e-2)),
    "8-bit AdamW": ("torchao", functools.partial(_from, "torchao.optim", "AdamW8bit", lr=1e-2)),
    "Prodigy": ("prodigyopt", functools.partial(_from, "prodigyopt", "Prodigy")),
}
COLUMNS = [
    *((module, "AdamW") for module in MODULES),
    *((module, name) for name in list(OPTIMIZERS)[1:] for module in ("tied weights", "wide")),
]


def _fit(strategy: Any, module: str, optimizer: str, precision: str, *, rotated: int = 0) -> dict[str, Tensor]:
    """All parameters; ranks have the batches of those ``rotated`` places further on."""
    pl.seed_everything(1, verbose=False)
    data = torch.randint(0, VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(2))
    final = Final()
    trainer = quiet_trainer(
        strategy=strategy, precision=precision, max_steps=4, gradient_clip_val=0.5, callbacks=[final]
    )
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, size, (rank + rotated) % size, shuffle=False))
    model = Model(module, OPTIMIZERS[optimizer][1])
    if optimizer == "Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    trainer.fit(model, loader)
    return final.parameters


def _precision(name: str) -> str:
    return "bf16-mixed" if name.endswith("_aligned") else "32-true"


@functools.cache
def _expected(precision: str, module: str, optimizer: str, rotated: int = 0) -> dict[str, Tensor]:
    # In fp32 it is the one engine that has to be told of parameters that a step leaves out.
    strategy = build(BASE, find_unused_parameters=precision == "32-true")
    return _fit(strategy, module, optimizer, precision, rotated=rotated)


def _far(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return max(float((found[n] - expected[n]).abs().max()) for n in found)


def _by_order(precision: str, module: str, optimizer: str) -> float:
    """How far the reference is from itself where its ranks have each other's batches, so that it sums in other orders.

    A gradient that is 0 but for rounding (a key's bias in attention) is a step of AdamW's as any other.
    """
    expected = _expected(precision, module, optimizer)
    others = range(1, torch.distributed.get_world_size())
    return max(_far(_expected(precision, module, optimizer, rotated), expected) for rotated in others)


def measure(name: str, module: str, optimizer: str) -> str:
    """One cell, on every rank."""
    warnings.simplefilter("ignore")
    try:
        precision = _precision(name)
        found, expected = _fit(name, module, optimizer, precision), _expected(precision, module, optimizer)
    except ConfigurationError as error:
        return f"refused: {error}"
    assert found.keys() == expected.keys()
    far = _far(found, expected)
    moved = all(bool(torch.isfinite(tensor).all()) for tensor in found.values())
    if not moved:
        return "differs: not finite"
    if all(torch.equal(found[n], expected[n]) for n in found):
        return EQUAL
    # Twice, since an engine may take an order that no rotation has.
    alike = far < TOLERANCES[precision] or far < 2 * _by_order(precision, module, optimizer)
    return ORDER if alike else f"differs: {far:.1e}"


def cell(ranks: int, name: str, module: str, optimizer: str) -> str:
    """One cell; a rank that fails says so."""
    try:
        found = set(run_distributed(measure, ranks, name, module, optimizer, timeout=300))
    except DistributedError as error:
        cause = re.search(r"(\w+Error): (.*)", str(error))
        return f"fails: {cause[2] if cause else error}"
    return found.pop() if len(found) == 1 else f"differs between ranks: {sorted(found)}"


def columns() -> Iterator[tuple[str, str]]:
    """Those whose packages are installed."""
    return ((m, o) for m, o in COLUMNS if importlib.util.find_spec(OPTIMIZERS[o][0]) is not None)


def rows() -> list[str]:
    """The strategy names but stage 0, which is the DDP engine, and NVMe, whose kernel takes minutes to compile."""
    return [name for name in PRESETS if "nvme" not in name and "stage_0" not in name]


def head(title: tuple[str, str]) -> str:
    """What a column is called."""
    module, optimizer = title
    return module if optimizer == "AdamW" else optimizer + ", wide" * (module == "wide")


def markdown(results: Mapping[str, str], ranks: int, titles: list[tuple[str, str]]) -> str:
    """A table of names by columns, one row for names with the same cells, and notes with the reasons of refusals."""
    notes: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for name in rows():
        cells = [results[key(ranks, name, *title)] for title in titles]
        shown = [c if len(c) == 1 else f"no [{notes.setdefault(_reason(c), len(notes) + 1)}]" for c in cells]
        names.setdefault(" | ".join(shown), []).append(f"`{name}`")
    lines = [f"| | {' | '.join(map(head, titles))} |", "|---" * (len(titles) + 1) + "|"]
    lines += [f"| {', '.join(alike)} | {cells} |" for cells, alike in names.items()]
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in notes.items())])


def _reason(verdict: str) -> str:
    """The first sentence of a refusal, without what differs from name to name."""
    text = re.sub(r"^differs: .*", "different by more than the order of sums", verdict)
    return " ".join(text.split())[:400]


def key(ranks: int, name: str, module: str, optimizer: str) -> str:
    """The name of a cell in the file of results."""
    return f"{ranks} | {name} | {module} | {optimizer}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--results", type=Path, default=Path("equality.json"))
    parser.add_argument("--only", nargs="+", default=[""], help="columns with one of these in their names")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    arguments = parser.parse_args()
    results: dict[str, str] = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    titles = [title for title in columns() if any(only in " ".join(title) for only in arguments.only)]
    for ranks in arguments.ranks:
        for title in titles:
            for name in rows():
                if (where := key(ranks, name, *title)) not in results:
                    results[where] = cell(ranks, name, *title)
                    arguments.results.write_text(json.dumps(results, indent=1))
                    print(where, results[where][:150], flush=True)
    if arguments.write is not None:
        page = arguments.write.read_text()
        for ranks in arguments.ranks:
            begin, end = f"<!-- {ranks} processes -->", f"<!-- end of {ranks} processes -->"
            before, _, rest = page.partition(begin)
            by_kind = [[t for t in titles if t[1] == "AdamW"], [t for t in titles if t[1] != "AdamW"]]
            tables = "\n\n".join(markdown(results, ranks, kind) for kind in by_kind if kind)
            page = f"{before}{begin}\n\n{tables}\n\n{end}{rest.partition(end)[2]}"
        arguments.write.write_text(page)


if __name__ == "__main__":
    main()

"""torchdata's StatefulDataLoader, under which samples were repeated and missed, goes on as a stock loader does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_shard.resume.wrap import order_warning, resumable
from tests.harness import run_distributed
from tests.models import TinyLM, Tokens, quiet_trainer
from tests.resume.support import Numbers, StatefulStream, ids, through_file
from tests.resume.test_accumulation import Saves

loaders: Any = pytest.importorskip("torchdata.stateful_dataloader")
COUNT = 36


class Shards(StatefulStream):
    """A stream of which each worker has its own part."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in super().__iter__():
            if number % workers == worker:
                yield number


def streams(workers: int, length: int = 15) -> Any:
    loader = resumable(loaders.StatefulDataLoader(Shards(length), 2, num_workers=workers), world_size=1, rank=0)
    assert order_warning(loader) is None
    return loader


@pytest.mark.parametrize(("workers", "lookahead"), [(0, 1), (2, 0)])
def test_a_stream_goes_on_after_the_last_batch_trained_on(workers: int, lookahead: int) -> None:
    torch.manual_seed(0)
    whole = ids(streams(workers))
    loader = streams(workers)
    loader.lookahead = lookahead
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(3 + lookahead)][:3]
    before = torch.get_rng_state()
    state = through_file(loader.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    resumed = streams(workers)
    resumed.load_state_dict(state)
    assert first + ids(resumed) == whole
    assert ids(resumed) == whole


class Recorder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.layer(batch.float().view(-1, 1) / COUNT).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(kind: str, path: str, *, steps: int = -1, ckpt_path: str | None = None, **options: Any) -> Any:
    torch.manual_seed(torch.distributed.get_rank())  # of which torchdata's sampler draws its seed
    module = Recorder()
    trainer = quiet_trainer(strategy="shard_ddp", max_epochs=2, max_steps=steps)
    loader = (DataLoader if kind == "stock" else loaders.StatefulDataLoader)(
        Numbers(COUNT), 3, **{"shuffle": True, **options}
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    if steps > 0:
        trainer.save_checkpoint(path)
    return module.seen


def _runs(path: str) -> Any:
    """Uninterrupted with stock loaders and with torchdata's, and what is left after 8 steps."""
    return [_fit(kind, path, num_workers=0) for kind in ("stock", "torchdata")] + [
        _fit("torchdata", path, steps=8),
        _fit("torchdata", path, ckpt_path=path, num_workers=1),
    ]


@pytest.mark.matrix
def test_it_deals_out_and_resumes_as_a_stock_loader_at_another_number_of_processes_too(tmp_path: Any) -> None:
    path = str(tmp_path / "saved.ckpt")
    runs = run_distributed(_runs, 2, path)
    for stock, whole, first, rest in runs:
        assert whole == stock == first + rest
        assert len(first) == 8  # of 6 in an epoch
    [alone] = run_distributed(_fit, 1, "torchdata", path, ckpt_path=path)
    seen = [i for run in runs for epoch, batch in run[2] if epoch == 1 for i in batch]
    assert sorted(seen + [i for _, batch in alone for i in batch]) == list(range(COUNT))


def _from_stock(path: str, after: int) -> list[tuple[int, int]]:
    """Batches after a checkpoint of stock Lightning in two epochs of 8, and how often it was warned of them."""
    found = []
    for make in (DataLoader, loaders.StatefulDataLoader):
        saves = Saves(path, inside=False, after=after)
        quiet_trainer(strategy="auto", max_steps=9, callbacks=[saves]).fit(TinyLM(), make(Tokens(32), 4))
        module = TinyLM()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(strategy="shard_ddp", max_epochs=2).fit(module, make(Tokens(32), 4), ckpt_path=path)
        said = [each for each in caught if "was saved without this package" in str(each.message)]
        found.append((len(module.seen), len(said)))
    return found


@pytest.mark.parametrize(("after", "left", "warned"), [(3, 13, 1)])
def test_a_place_in_the_data_that_stock_lightning_saved_is_not_known(
    tmp_path: Path, after: int, left: int, warned: int
) -> None:
    found = run_distributed(_from_stock, 1, str(tmp_path / "stock.ckpt"), after)
    assert found == [[(left, warned), (left, warned)]]

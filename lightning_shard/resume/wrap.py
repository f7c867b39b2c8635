"""Which loaders can be resumed, by what, and what is said of the others."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_shard.resume.iterable import StatefulIterableLoader, has_state
from lightning_shard.resume.loader import Draws, ResumableLoader
from lightning_shard.resume.shape import length_of


def resumable(
    dataloader: Any, *, world_size: int, rank: int, inner_sampler: Any = None, draws: Draws | None = None
) -> Any:
    """The training `dataloader` with ``state_dict`` and ``load_state_dict``, otherwise as it was.

    Call it on every rank for a loader whose sampler is already the one to train with; the arguments are as for
    :class:`ResumableLoader`. What has a state of its own, or can't be resumed (see :func:`order_warning`), or is no
    torch DataLoader, is the same object.
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader, ResumableLoader | StatefulIterableLoader):
        return dataloader
    dataset = dataloader.dataset
    torchdata = any(cls.__module__.startswith("torchdata.stateful_dataloader") for cls in type(dataloader).__mro__)
    iterable = isinstance(dataset, IterableDataset)
    if has_state(dataloader) and not (torchdata and not iterable and not has_state(dataset)):
        if not torchdata and length_of(dataloader) is not None:
            return dataloader
        return StatefulIterableLoader(dataloader, world_size=world_size, source=dataloader)
    if not iterable:
        ranks = {"world_size": world_size, "rank": rank}
        return ResumableLoader(dataloader, **ranks, inner_sampler=inner_sampler, draws=draws)
    if has_state(dataset) and dataloader.num_workers == 0:
        return StatefulIterableLoader(dataloader, world_size=world_size, source=dataset)
    return dataloader


def order_warning(loader: Any) -> str | None:
    """Why the order of what :func:`resumable` gave is not restored on resume; None if it is."""
    if isinstance(loader, ResumableLoader):
        if loader.num_workers > 0 and not loader.in_order:
            return (
                "DataLoader(in_order=False): workers deliver batches in an order that is not repeatable, so that a"
                " resumed run can repeat or miss some of them. Set in_order=True to resume exactly."
            )
        return None
    if has_state(loader):
        return None
    dataset = getattr(loader, "dataset", loader)
    name = type(dataset).__name__
    if has_state(dataset):
        return (
            f"the state of {name} lives in the {loader.num_workers} worker processes of its DataLoader and can't be"
            " read from here: on resume its order is not restored, it starts from its beginning. Set num_workers=0,"
            " or use a loader with state_dict and load_state_dict (such as torchdata's StatefulDataLoader)."
        )
    return (
        f"{name} is iterable and has no state_dict: on resume its order is not restored, it starts from its"
        " beginning. Give the dataset or the loader state_dict() and load_state_dict() to go on where it was."
    )

"""The words of the memory tables."""

from lightning_shard.memory import KindBytes, MemoryAccount


def test_accounts_add_kind_by_kind_and_place_by_place():
    first = MemoryAccount(device=KindBytes(parameters=1, gradients=2), host=KindBytes(optimizer=4))
    second = MemoryAccount(device=KindBytes(parameters=8), nvme=KindBytes(optimizer=16))
    total = first + second
    assert (total.device, total.host, total.nvme) == (
        KindBytes(parameters=9, gradients=2),
        KindBytes(optimizer=4),
        KindBytes(optimizer=16),
    )
    assert [place.total for place in (total.device, total.host, total.nvme)] == [11, 4, 16]

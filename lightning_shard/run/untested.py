"""Check an engine's arithmetic before it trains if libraries are newer than the tested ones."""

from collections.abc import Callable

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard.errors import PrecisionContractError
from lightning_shard.versions import newer_than_tested, tested

_passed: set[str] = set()  # Checked in this process, by strategy and precision.


def check_untested_versions(checked: str, check: Callable[[], str], *, aligned: bool) -> None:
    """Compare an engine with a plain loop, once in a process, if a library is newer than the tests. All ranks call it
    at the start of a fit. ``checked``: strategy and precision, for messages. ``check``: returns the difference as text,
    empty if there is none. PrecisionContractError, if ``aligned``, else a warning: they differ.
    """
    newer = newer_than_tested()
    if not newer or checked in _passed:
        return
    found = " and ".join(f"{library} {version}" for library, version in newer.items())
    known = ", ".join(f"{library} {tested(library)}" for library in newer)
    newer_is = f"{found} is newer than the versions that lightning_shard was tested on ({known}). "
    if not (difference := check()):
        _passed.add(checked)
        rank_zero_info(f"{newer_is}The numbers of {checked} were checked against a plain loop, and are equal.")
        return
    problem = f"{newer_is}{checked} differs from a plain loop over the same data: {difference} of its largest element. "
    cure = f"Install {known}, or a newer lightning_shard."
    if aligned:
        raise PrecisionContractError(f"{problem}aligned: true holds equal numbers. {cure}")
    rank_zero_warn(problem + cure)

"""Which groups of tests run, what is said about those that do not, and the end of the worker processes.

A test of a marked group runs only when `-m` names the group: `pytest` alone leaves all of them out,
`pytest -m matrix` runs that one.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.harness import ROOT, close_pools
from tests.slurm.cluster import why_not

GROUPS = ("matrix", "soak", "slurm", "gpu")
ID_LENGTH = 60

_LEFT_OUT = pytest.StashKey[dict[str, tuple[int, str]]]()
_MISSING = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def _own_environment() -> Generator[None, None, None]:
    """Undo a test's changes to the environment, which processes of later tests would inherit."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name not in before and name != "PYTEST_CURRENT_TEST"]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Generator[None, None, None]:
    """End a process group that a test began in this process; metrics of the next test would synchronise over it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-groups",
        default="",
        metavar="GROUP,...",
        help="fail if a group named here ran no test (for CI, where a group left out must not pass unseen)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A slow example says that the machine is busy, and nothing about the package.
    settings.register_profile("busy", deadline=None)
    settings.load_profile("busy")
    unknown = set(_required(config)) - set(GROUPS)
    if unknown:
        raise pytest.UsageError(f"--require-groups: no group named {sorted(unknown)}; there are {list(GROUPS)}")


def pytest_make_parametrize_id(val: object, argname: str) -> str:
    """What a value is called in the id of a case whose test gives it no name: a report has to say what failed."""
    text = _named(val)
    if "<lambda>" in text:
        raise pytest.UsageError(f"{argname}: the cases need ids, since a lambda does not say what it does")
    if val is None or isinstance(val, bool | int | float):
        text = f"{argname}={text}"
    return text if len(text) <= ID_LENGTH else f"{text[: ID_LENGTH - 3]}..."


def _named(value: object, nested: bool = False) -> str:
    """The value in one line, as one writes it."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        keys = [f"{key}=" for key in value] if isinstance(value, dict) else [""] * len(value)
        values = value.values() if isinstance(value, dict) else value
        text = ",".join(key + _named(each, nested=True) for key, each in zip(keys, values, strict=True)) or str(value)
        return f"({text})" if nested and value else text
    if isinstance(value, torch.Tensor):
        return f"{_named(value.dtype)}{list(value.shape)}"
    text = repr(value) if isinstance(value, bytes | BaseException) else getattr(value, "__name__", str(value))
    if isinstance(value, torch.nn.Module) or " at 0x" in text:
        return type(value).__name__
    return " ".join(text.replace(f"{ROOT}/", "").removeprefix("torch.").replace("\\", "").split())


def _skip_off_device(items: list[pytest.Item]) -> None:
    from tests.stand_in import NOT_ON_A_DEVICE

    for item in items:
        for part, reason in NOT_ON_A_DEVICE.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"not on a stand-in for a GPU: {reason}"))


# Ahead of pytest's own deselection by `-m`, which would drop tests without a word about their group.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = config.option.markexpr
    reasons: dict[str, list[str]] = {}
    kept, dropped = [], []
    for item in items:
        groups = _groups(item)
        left_out = next((group for group in groups if not re.search(rf"\b{group}\b", named)), None)
        if left_out is not None:
            reasons.setdefault(left_out, []).append(f"run `pytest -m {left_out}`")
        elif "gpu" in groups and not _has_cuda():
            left_out = "gpu"
            reasons.setdefault("gpu", []).append("no CUDA device here")
        elif "slurm" in groups and (reason := why_not()) is not None:
            left_out = "slurm"
            reasons.setdefault("slurm", []).append(reason)
        (kept if left_out is None else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if os.environ.get("TESTS_DEVICE"):
        _skip_off_device(items)
    config.stash[_LEFT_OUT] = {group: (len(why), why[0]) for group, why in reasons.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under ``-n`` a file is a worker's: what its tests share is made once, and none runs beside another of it."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker has collected all tests; its process is the one that knows which it left out."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    close_pools()
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[_LEFT_OUT]
        return
    config.stash[_MISSING] = [group for group in _required(config) if group not in _groups_that_ran(config)]
    if config.stash[_MISSING] and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _groups_that_ran(config: pytest.Config) -> set[str]:
    told: dict[str, list[Any]] = config.pluginmanager.getplugin("terminalreporter").stats
    return {name for kind in ("passed", "failed") for report in told.get(kind, []) for name in report.keywords}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for group, (count, reason) in sorted(config.stash.get(_LEFT_OUT, {}).items()):
        terminalreporter.write_line(f"{count} tests of `{group}` not selected: {reason}")
    for reason, count in sorted(Counter(r.longrepr[2] for r in terminalreporter.getreports("skipped")).items()):
        terminalreporter.write_line(f"{count} tests left out: {reason.removeprefix('Skipped: ')}")
    for group in config.stash.get(_MISSING, []):
        terminalreporter.write_line(f"FAILED: `{group}` was required and ran no test", red=True)


def _required(config: pytest.Config) -> list[str]:
    return [group for group in config.getoption("--require-groups").split(",") if group]


def _groups(item: pytest.Item) -> list[str]:
    return [group for group in GROUPS if item.get_closest_marker(group)]


def _has_cuda() -> bool:
    # Imported here: collecting tests that have no GPU among them needs no torch.
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face has it: configuration, tokenizer and weights of a tiny BERT."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "def", "return", "self", "if", "for", "class", "(", ")", ":"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    return folder

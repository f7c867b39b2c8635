"""``import lightning_shard.pytorch_lightning`` makes ``pytorch_lightning`` another name of ``lightning.pytorch``.

Use it for packages that import the older namespace. Lightning's Trainer does not recognise their classes otherwise.
Import it before those packages. Every module of ``lightning.pytorch`` and ``lightning.fabric`` is imported and entered
under its name in ``pytorch_lightning`` and ``lightning_fabric``, so that both names give the same classes.
"""

import importlib
import pkgutil
import sys
from contextlib import suppress
from types import ModuleType

import lightning.fabric
import lightning.pytorch

_NAMESPACES = {"pytorch_lightning": lightning.pytorch, "lightning_fabric": lightning.fabric}


def _enter(older: str, package: ModuleType) -> None:
    if sys.modules.get(older, package) is not package:
        raise ImportError(
            f"{older} was imported before lightning_shard.pytorch_lightning, which can't make it a name of "
            f"{package.__name__} any more. Import lightning_shard.pytorch_lightning first."
        )
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        with suppress(ImportError):  # a module needs a library that is not installed
            importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name == package.__name__ or name.startswith(f"{package.__name__}."):
            sys.modules[older + name.removeprefix(package.__name__)] = module


for _older, _package in _NAMESPACES.items():
    _enter(_older, _package)

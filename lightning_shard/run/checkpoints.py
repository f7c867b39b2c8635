"""Save and load the checkpoints of a run as portable directories, for every engine."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_shard.checkpoint import load
from lightning_shard.checkpoint.background import Saver
from lightning_shard.checkpoint.files import layout
from lightning_shard.checkpoint.files.location import StrPath, location, refuse_url
from lightning_shard.checkpoint.files.manifest import Contents, Facts
from lightning_shard.checkpoint.files.trainer_state import encode_trainer_state
from lightning_shard.checkpoint.foreign.hugging_face_folders import Skeleton, make_skeleton
from lightning_shard.checkpoint.foreign.lightning_file import ModuleNames
from lightning_shard.checkpoint.hyperparameters import KEYS, plain_hyperparameters
from lightning_shard.checkpoint.inspect import is_foreign, open_any
from lightning_shard.checkpoint.optimizer_state import check_savable, own_values
from lightning_shard.checkpoint.save import digests_of_frozen, training_state, write_portable
from lightning_shard.checkpoint.schedules import resolve_schedules
from lightning_shard.checkpoint.state_dict import OfferedState, follow_names
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.replicated import broadcast_from_rank_0
from lightning_shard.engines.unsharding import allow_state_dict
from lightning_shard.precision.policy import PrecisionPolicy
from lightning_shard.ranks import Ranks
from lightning_shard.run.averaging import Averaging
from lightning_shard.run.data import OWN_BUFFERS, own_buffers, restore_buffers
from lightning_shard.run.dtype_ledger import DtypeLedger
from lightning_shard.tensors.flat import torch_optimizer
from lightning_shard.tensors.names import fqns, persistent_buffers
from lightning_shard.tensors.tracing import tree_map_only
from lightning_shard.text import listed

_VALUES = "optimizer_values"


class Checkpoints:
    """Saves and loads an engine's tensors with the checkpoint that Lightning dumps."""

    def __init__(
        self, *, raise_nonfinite: Callable[[], None] = lambda: None, configured: bool = False, save_frozen: bool = True
    ) -> None:
        """``raise_nonfinite`` raises a pending error of the last step, on all ranks. ``configured``: the
        configuration's hyperparameters win if they differ. Without ``save_frozen`` checkpoints have digests of
        parameters that were always frozen.
        """
        self._raise_nonfinite, self._configured, self._save_frozen = raise_nonfinite, configured, save_frozen
        self.saver = Saver()  # Writes the checkpoints of all runs of a strategy, one after the other.
        self.opened: load.OpenCheckpoint | None = None
        """An open checkpoint that the next `load_checkpoint` may use."""
        self._loading: load.OpenCheckpoint | None = None
        self._converted: str | None = None
        self._training = False
        self.saved: list[str] = []
        """Paths of checkpoints with optimizer state that were saved since `attach_engine`, newest first."""
        self._base: dict[str, str] | None = None
        """FQN to digest of frozen tensors when fits of `module` began, before a checkpoint was loaded."""

    def attach_engine(
        self, module: nn.Module, engine: Engine, policy: PrecisionPolicy, ledger: DtypeLedger | None, root: str
    ) -> None:
        """Attach a module that ``engine`` has prepared. Foreign checkpoints are converted in the folder ``root``."""
        self._base = self._base if module is vars(self).get("module") else None
        self.module, self._engine, self._policy, self._ledger = module, engine, policy, ledger
        self._offered = OfferedState(module)
        self._root = root
        self.averaging: Averaging | None = None
        self._values: list[dict[str, Any]] = []
        self.saved = []

    def note_optimizer_values(self) -> None:
        """Keep the first values of optimizers' own attributes."""
        self._values = own_values(self._engine.optimizers())

    def _changed_values(self) -> list[dict[str, Any]]:
        """Attributes of optimizers (`own_values`) that differ from their first values."""
        pairs = zip(own_values(self._engine.optimizers()), self._values, strict=False)
        return [{n: v for n, v in new.items() if repr(v) != repr(old.get(n))} for new, old in pairs]

    def refuse_unsavable(self, trainer: Trainer) -> None:
        """Refuse a fit with checkpoint callbacks if no checkpoint of it can be saved. All ranks call it.

        ConfigurationError: optimizer state. CheckpointError: an object store for a file or a Hugging Face folder,
        Hugging Face's layout, states of callbacks that would not load. A warning names hyperparameters that no
        checkpoint can have.
        """
        forms = set()
        for callback in trainer.checkpoint_callbacks:
            name, folder = f"{getattr(callback, 'filename', None)}.ckpt", getattr(callback, "dirpath", None) or ""
            forms.add(form := layout.other_form(name))
            if form:
                refuse_url(folder, "one file or a folder for Hugging Face")
            if getattr(callback, "save_last", None) == "link":
                refuse_url(folder, "links: set save_last to true")
        if "hf" in forms:
            Ranks.of().first("naming the tensors of a .hf checkpoint", lambda: bool(self._skeleton()))
        if not forms:
            return
        check_savable(self._engine.optimizers(), fqns(self.module))
        if not is_overridden("on_save_checkpoint", self.module):  # which may convert them
            owners = dict(zip(KEYS, (self.module, vars(trainer).get("datamodule")), strict=True))
            state = {key: dict(getattr(owner, "hparams", {})) for key, owner in owners.items()}
            state, left_out = plain_hyperparameters(state)
            if left_out:
                rank_zero_warn(
                    f"Checkpoints are saved without the hyperparameters {listed(left_out)}, which no reader could "
                    "open without running code. Leave them out with save_hyperparameters(ignore=[...]), and give "
                    "them to load_from_checkpoint as arguments."
                )
            encode_trainer_state({**state, "callbacks": _first_states(trainer)}, stock="full" in forms)

    # Save

    def state_dict(self) -> dict[str, Any]:
        """FQN, including tied names, to this rank's live tensor, for the entries of the module's ``state_dict()``."""
        with allow_state_dict(self.module):
            return self._offered.offer(self._engine.masters())

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: StrPath,
        storage_options: Any | None = None,
        *,
        own: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        background: bool = False,
    ) -> None:
        """Write the checkpoint ``path`` atomically, in the form of its name. All ranks call it.

        ``checkpoint``: Lightning's dump. Rank 0's dump and ``path`` count. ``own``: state of each rank alone. ``run``:
        name, step and time. None: the checkpoint belongs to no run. ``background``: see `Saver`. CheckpointError, on
        every rank: a rank failed (an older checkpoint stays), an earlier background save failed, or
        ``storage_options``, which are fsspec's for object stores, were given for a path.
        """
        target = Ranks.of().broadcast(os.fspath(path))
        where = location(target, storage_options)
        mine = own_buffers(self.module)
        if own and not self._engine.shares_buffers:
            own = {OWN_BUFFERS: mine, **own}  # During a validation ``own`` has the buffers from before it.
        self.synchronize()
        averaging = self.averaging
        if averaging is not None:
            checkpoint = averaging.add_count(checkpoint)
        checkpoint, _ = plain_hyperparameters(checkpoint)
        checkpoint |= self._engine.checkpoint_metadata()
        leave_out = self._offered.left_out(checkpoint.pop("state_dict"))
        averages = None if averaging is None else averaging.tensors()
        left: dict[str, str] = {}
        if not self._save_frozen and layout.other_form(target) != "hf":
            left = digests_of_frozen(self.module, self._engine.masters(), averages)
        # A parameter that was trained first and is frozen now is saved nowhere else.
        base = left if self._base is None else self._base
        left = {fqn: digest for fqn, digest in left.items() if fqn not in leave_out and digest == base.get(fqn)}
        with_optimizers = layout.OPTIMIZER_STATES in checkpoint
        if with_optimizers:
            self._engine.before_saving()
            if self._ledger is not None:
                self._ledger.warn_of_parted_replicas()
        measured = None if self._ledger is None else self._ledger.measured()

        def collect() -> Contents:
            optimizers = self._engine.optimizers() if with_optimizers else []
            if with_optimizers and not optimizers and checkpoint.get("global_step", 0) > 0:
                rank_zero_warn(
                    f"{target} gets no optimizer state: under this strategy the fit's is gone once a validation or "
                    "test of its own has begun. Save before it, to go on training from the checkpoint."
                )
            with allow_state_dict(self.module):
                return training_state(
                    module=self.module,
                    optimizers=optimizers,
                    masters=self._engine.masters(),
                    averages=averages,
                    trainer_state=checkpoint,
                    own_state=own and {_VALUES: self._changed_values(), **own},
                    facts=Facts(
                        engine=self._engine.name,
                        policy=self._policy.text(),
                        ledger=measured.to_json() if measured else {},
                        run=dict(run or {}) if with_optimizers else {},
                        frozen=left,
                    ),
                    leave_out=leave_out | left.keys(),
                )

        if with_optimizers:
            self.saved = [target, *(path for path in self.saved if path != target)]
        # In the background only during training, since the next step or the end of training reports a failure.
        with nullcontext() if averaging is None else averaging.out_of_module():
            if own and OWN_BUFFERS in own:
                restore_buffers(self.module, own[OWN_BUFFERS])
                self.synchronize_buffers()
            self.saver.save(where, collect, background=background and self._training, make_skeleton=self._skeleton)
        restore_buffers(self.module, mine)  # A save does not change the run.

    def _skeleton(self) -> Skeleton:
        trainer = getattr(self.module, "trainer", None)
        return make_skeleton(self.module, [self.module, *filter(None, [getattr(trainer, "datamodule", None)])])

    def synchronize(self) -> None:
        """Put stepped values into the module, and rank 0's buffers on every rank. All ranks call it."""
        self._engine.reshard_and_sync_masters()
        self.synchronize_buffers()

    def synchronize_buffers(self) -> None:
        """Give every rank the buffers of rank 0, so that evaluation and checkpoints do not depend on the rank."""
        self._raise_nonfinite()
        broadcast_from_rank_0(dict.fromkeys(buffer for _, buffer in persistent_buffers(self.module)))

    def _digest_frozen(self, *, fits: bool) -> None:
        """Before weights change: digest the frozen parameters, which need not be saved."""
        if fits and not self._save_frozen and self._base is None:
            # Averages may begin later.
            self._base = digests_of_frozen(self.module, self._engine.masters(), None)

    # In the background

    def start_of_training(self) -> None:
        """From here on saves may run in the background. All ranks call it."""
        self._training = True
        self._digest_frozen(fits=True)

    def end_of_training(self) -> None:
        """Complete all saves. CheckpointError: a background save failed. All ranks call it."""
        self._training = False
        self._engine.reshard_and_sync_masters()  # for values that hooks wrote since the last step
        self._raise_nonfinite()
        self.saver.finish_background_save()

    def end_saving(self) -> None:
        """Wait for a background save in any state of the run, without communication."""
        self._training = False
        if (failure := self.saver.free_buffers()) is not None:
            rank_zero_warn(f"A checkpoint could not be saved in the background: {failure}")

    # Load

    def load_checkpoint(self, path: StrPath, *, fits: bool = True) -> dict[str, Any]:
        """Read ``trainer.pt``, and for a fit the states of ranks. `load_tensors` reads the tensors. All ranks call it.

        Other forms are first converted into a directory in the run's folder, which is removed after loading. Nothing in
        a checkpoint is unpickled freely.
        """
        given = path
        if Ranks.of().first(f"opening {path}", lambda: is_foreign(path)):
            path = self._convert(path)
        opened, self.opened = self.opened, None
        is_open = opened is not None and str(opened.path) == str(location(path))
        self._loading = opened if opened is not None and is_open else load.open_checkpoint(path)
        self._loading.directory.path = location(given)  # errors name this path
        state = load.with_own_states(self._loading) if fits else dict(self._loading.trainer_state)
        self._loading = replace(self._loading, trainer_state=state)
        return {**state, "state_dict": self._loading.state_dict() if _follows_names(self.module) else {}}

    def _convert(self, path: StrPath) -> str:
        """Convert a foreign checkpoint into a portable directory, and return its path. All ranks call it."""
        ranks = Ranks.of()
        target = ranks.broadcast(str(location(self._root).absolute() / f".converted-{layout.new_token()}.ckpt"))
        rank_zero_info(f"Converting {path} into {target}, which is removed after loading.")
        live = self._engine.optimizers()
        names = partial(ModuleNames.of, self.module, live)  # A stock file lacks these names.
        opened = partial(open_any, path, names, optimizers="named" if live else "none")
        stored = ranks.agree(f"opening {path}", opened)
        self._converted = target
        write_portable(target, stored)
        return target

    def remove_converted(self) -> None:
        converted, self._converted = self._converted, None
        if converted is not None:
            self.saver.remove_checkpoint(converted)

    def load_tensors(
        self,
        hooked: Mapping[str, Any] | None = None,
        schedules: Sequence[Any] = (),
        *,
        optimizers: bool,
        strict: bool,
        begins: bool = True,
        averaged: bool = False,
    ) -> None:
        """Read the tensors into the live parameters and buffers, and with ``optimizers`` into their slots. All ranks
        call it.

        ``hooked``: the checkpoint after ``on_load_checkpoint``. Optimizers that it lacks begin without state.
        ``schedules``: Lightning's, whose state is loaded later. ``strict``: refuse missing and unexpected tensors.
        ``begins``: a run begins with it, and a warning names the hyperparameters that win. ``averaged``: parameters get
        their averages. CheckpointError: on every rank, before anything is changed.
        """
        assert self._loading is not None
        self.synchronize()
        self._digest_frozen(fits=optimizers)
        # A learning rate finder restores its own checkpoint as it is: no run begins with it.
        begins = begins and not self._loading.path.name.startswith(".lr_find_")
        state, configured = self._loading.trainer_state, self._configured and begins
        edited = None
        if hooked is not None and state.get(layout.OPTIMIZER_STATES):
            optimizers = optimizers and bool(hooked.get(layout.OPTIMIZER_STATES))
        try:
            # Trial steps are undone by a checkpoint from before them, and run without schedules.
            settled = optimizers and begins and not self._loading.path.name.startswith(".trial_")
            schedulers = resolve_schedules(schedules, hooked or state, configured=configured) if settled else []
            if hooked is not None and _follows_names(self.module):
                edited, strict = follow_names(self.module, self._loading.manifest, hooked["state_dict"], strict=strict)
            report = load.load_training_state(
                self._loading,
                module=self.module,
                optimizers=self._engine.optimizers() if optimizers else [],
                masters=self._engine.masters(),
                averages=None if self.averaging is None else self.averaging.tensors(),
                strict=strict,
                configured=configured,
                averaged=averaged and bool(state.get(layout.AVERAGING_STATE, {}).get("n_averaged", 1)),
                state=edited,
            )
        finally:
            if self._converted is not None:
                self._loading.directory.close()  # An error's frames keep it, and open files can't be removed.
            self._loading = None
            self.remove_converted()
        if begins:
            _warn_of_load(report, [*report.overridden, *schedulers], strict=strict, configured=configured)
        self._engine.refresh_model_weights()
        if self.averaging is not None:
            self.averaging.continue_from(state, averages=report.averages)
        if optimizers:
            own = state.get(layout.RUN_STATE, {}).get("ranks", [])
            values = own[Ranks.of().rank % len(own)].get(_VALUES, []) if own else []
            for optimizer, kept in zip(self._engine.optimizers(), values, strict=False):
                vars(torch_optimizer(optimizer)).update(kept)
            self._engine.resumed()


def _first_states(trainer: Any) -> dict[str, Any]:
    """States of callbacks as of now, without tensors."""
    states: dict[str, Any] = {}
    for callback in trainer.callbacks:
        with suppress(Exception):  # a callback may not be set up yet
            states[callback.state_key] = tree_map_only(torch.Tensor, lambda _: 0, callback.state_dict())
    return states


def _follows_names(module: nn.Module) -> bool:
    """Whether the module has code of its own that sees a ``state_dict`` before it is loaded."""
    own = type(module).load_state_dict is not nn.Module.load_state_dict
    return own or is_overridden("on_load_checkpoint", module, parent=LightningModule)


def _warn_of_load(report: load.LoadReport, differing: Sequence[str], *, strict: bool, configured: bool) -> None:
    """Warn of tensors that were not loaded, and say whose hyperparameters win if they differ."""
    for outcome, names in (("keep their values", report.missing), ("are in the checkpoint alone", report.unexpected)):
        if names:
            why = "The module's own code leaves them out" if strict else "strict_loading is False"
            rank_zero_warn(f"{why}: these {outcome} ({len(names)}): {listed(sorted(names), most=5)}.")
    if differing:
        rank_zero_warn(
            f"The configuration's hyperparameters win: {'; '.join(differing)} as in the checkpoint."
            if configured
            else f"The checkpoint's hyperparameters win: {'; '.join(differing)} as configured. Set "
            "resume_hyperparameters: configuration on the strategy for those."
        )

"""ShardDeepSpeedStrategy under the Trainer as users know it: the same runs as under FSDP, or a clear error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard import full_tensor, set_full_tensor
from lightning_shard.checkpoint.load import read_manifest
from lightning_shard.engines.zero.config import OptimizerOffload, Stage3Options, ZeroBuckets, ZeroPlusPlus
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision.ledger.record import STATE
from lightning_shard.strategies.deepspeed import ShardDeepSpeedStrategy
from lightning_shard.strategies.precision import ShardPrecision
from tests.harness import DistributedError, run_distributed
from tests.models import VOCAB, Block, Final, TinyLM, all_parameters, loader, quiet_trainer
from tests.strategies.test_parity import ENGINES, differences
from tests.strategies.test_switch import stored

STAGES = ["zero_1", "zero_2", "zero_3"]
OFFLOADED = ["zero_2_offload", "zero_3_offload"]


class Manual(TinyLM):
    """Clips and steps by hand, after every ``every`` backward passes."""

    def __init__(self, every: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class Adapter(TinyLM):
    """All frozen but the head and the module's own parameter; the optimizer is given the frozen ones too."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            self.embed.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ResettableBlock(Block):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.0 + 2.0**-12)


class Meta(TinyLM):
    """Built on the meta device."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        self.meta = True
        super().configure_model()
        for block in self.blocks:
            block.__class__ = ResettableBlock


class Unused(TinyLM):
    """With a layer that no loss depends on."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            self.never = nn.Linear(3, 3)


class InZeroInit(TinyLM):
    """Built by the user under DeepSpeed's own context, which cuts each layer as it is made."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        import deepspeed

        torch.manual_seed(self.seed)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(dtype=torch.float32, config_dict_or_path=config):
            self.embed = nn.Embedding(VOCAB, self.width)
            self.blocks = nn.ModuleList(Block(self.width, self.dropout) for _ in range(self.depth))
            self.head = nn.Linear(self.width, VOCAB, bias=False)
        self.frozen = nn.Parameter(torch.full((self.width,), 0.5), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(self.width))


class WithoutOptimizer(TinyLM):
    def configure_optimizers(self) -> None:
        return None


def fit(
    engine: str, kind: type[TinyLM], precision: str, strategy: dict[str, Any], trainer: dict[str, Any], **model: Any
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = kind(**model), Final()
    settings = {"aligned": True, **(strategy if engine.startswith("zero") else {})}
    if "aligned" in strategy:
        settings["aligned"] = strategy["aligned"]
    loop = quiet_trainer(
        strategy=ENGINES[engine](**settings),
        precision=precision,
        callbacks=[final],
        **{"max_steps": 6, **trainer},
    )
    loop.fit(module, loader(), loader(count=16, shuffle=False))
    ledger = loop.strategy.ledger
    return {
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "losses": module.losses,
        "ledger": ledger.entries,
        "reductions": {r.dtype for r in ledger.reductions},
    }


def fit_all(engines: list[str], *args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return {engine: fit(engine, *args, **kwargs) for engine in engines}


def check_equal(engines: list[str], kind: type[TinyLM], precision: str = "32-true", **kwargs: Any) -> Any:
    """Every engine takes the steps of FSDP, bit by bit."""
    arguments = (kwargs.pop("strategy", {}), kwargs.pop("trainer", {}))
    ranks = run_distributed(fit_all, 2, ["full", *engines], kind, precision, *arguments, timeout=240, **kwargs)
    for rank in ranks:
        for engine in engines:
            for part in ("parameters", "optimizer"):
                assert differences(rank["full"][part], rank[engine][part]) == {}, (engine, part)
            assert rank[engine]["losses"] == rank["full"]["losses"], engine
    assert ranks[0]["full"]["losses"] != ranks[1]["full"]["losses"]
    return ranks


def test_manual_optimization() -> None:
    check_equal(["zero_0", *STAGES, *OFFLOADED], Manual)
    # Stages 2 and 3 reduce every backward pass, as FSDP does.
    check_equal(["zero_2", "zero_3", *OFFLOADED], Manual, "bf16-mixed", every=2, trainer={"max_steps": 3})


def test_adapters_over_a_frozen_model() -> None:
    ranks = check_equal(STAGES, Adapter, "bf16-mixed")
    for engine in STAGES:
        assert {name.split(".")[0] for name in ranks[0][engine]["optimizer"]} == {"head", "shift"}


def test_models_on_the_meta_device_and_in_zero_init() -> None:
    check_equal([*STAGES, "zero_3_offload"], Meta, "bf16-mixed")
    # The user's own context leaves another F.linear behind, which the contract does not allow.
    [rank, _] = run_distributed(fit_all, 2, ["zero_3"], InZeroInit, "bf16-mixed", {}, {}, timeout=120)
    [whole, _] = run_distributed(fit_all, 2, ["full"], TinyLM, "bf16-mixed", {}, {}, timeout=120)
    assert differences(rank["zero_3"]["parameters"], whole["full"]["parameters"]) == {}


@pytest.mark.parametrize("what", ["units", "selective"])
def test_activation_checkpointing_changes_no_number(what: str) -> None:
    check_equal(STAGES, TinyLM, "bf16-mixed", strategy={"activation_checkpointing": what})


def test_low_memory_steps_bf16_parameters() -> None:
    ranks = check_equal(STAGES, TinyLM, "bf16-true", strategy={"aligned": False})
    values = [*ranks[0]["zero_1"]["parameters"].values(), *ranks[0]["zero_1"]["optimizer"].values()]
    assert {value.dtype for value in values} == {torch.bfloat16, torch.float32}  # fp32: Adam's step and `frozen`
    assert ranks[0]["zero_3"]["parameters"]["head.weight"].dtype == torch.bfloat16


def test_the_ledger_shows_the_masters() -> None:
    ranks = check_equal([*STAGES, "zero_2_offload"], TinyLM, "bf16-mixed", dtype=torch.bfloat16)
    for engine, run in ranks[0].items():
        entry = run["ledger"]["head.weight"]
        for stage in ("optimizer", "gradient", "step", f"{STATE}exp_avg"):
            assert entry.column(stage) == {torch.float32}, (engine, stage, entry.stages)
        assert entry.column("forward") == {torch.bfloat16}
        assert run["reductions"] == {torch.float32}


class Attentive(TinyLM):
    """With attention, which reads the weights of a module in it, and without a parameter of its own."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            self.attention = nn.MultiheadAttention(self.width, 2, batch_first=True)
            del self.frozen, self.shift

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.backward_reaches_embedding())
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole_near_the_end_of_backward() -> tuple[list[list[str]], dict[str, set[torch.dtype]]]:
    """The parameters that are whole when backward is at the first module, by step; in which dtypes forward saw each."""
    found: list[list[str]] = []

    class Watching(Attentive):
        def backward_reaches_embedding(self) -> None:
            # Not when it has ended: DeepSpeed cuts all that is left then.
            found.append([n for n, p in self.named_parameters() if p.ds_status.name == "AVAILABLE"])

    strategy = ShardDeepSpeedStrategy(stage=3, stage3=Stage3Options(param_persistence_threshold=0))
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=4)
    trainer.fit(Watching(), loader())
    return found, {name: entry.column("forward") for name, entry in strategy.ledger.entries.items()}


def test_stage_3_cuts_again_what_backward_has_passed() -> None:
    for found, forward in run_distributed(whole_near_the_end_of_backward, 2):
        assert len(found) == 4
        for names in found:
            # Its input has no gradient that would tell DeepSpeed of the end of its backward.
            assert set(names) <= {"embed.weight"}, names
        assert set(forward) > {"attention.out_proj.weight", "attention.in_proj_weight", "head.weight"}
        assert all(dtypes == {torch.bfloat16} for name, dtypes in forward.items() if "scale" not in name), forward


def held_in(engines: list[str], precision: str, **strategy: Any) -> dict[str, torch.dtype]:
    """Engine -> the one dtype in which gradients waited for the next micro-batch's; each was seen on some rank."""
    trainer = {"accumulate_grad_batches": 2, "max_steps": 1}
    ranks = run_distributed(fit_all, 2, engines, TinyLM, precision, strategy, trainer, timeout=240)
    found: dict[str, torch.dtype] = {}
    for engine in engines:
        columns: dict[str, set[torch.dtype]] = {}
        for rank in ranks:
            for name, entry in rank[engine]["ledger"].items():
                if entry.kind == "trainable":
                    columns.setdefault(name, set()).update(entry.column("accumulated"))
        assert all(columns.values()), (engine, columns)
        (found[engine],) = set().union(*columns.values())
    return found


def test_the_ledger_shows_gradients_held_between_micro_batches() -> None:
    engines = [*STAGES, "zero_1_offload", *OFFLOADED]
    assert held_in(engines, "bf16-mixed") == dict.fromkeys(engines, torch.float32)
    whole = ["zero_2", "zero_2_offload"]
    assert held_in(whole, "32-true") == dict.fromkeys(whole, torch.float32)
    assert held_in(STAGES, "bf16-true", aligned=False) == dict.fromkeys(STAGES, torch.bfloat16)


def test_a_plain_name_reduces_in_the_dtype_that_it_is_told() -> None:
    strategy = {"aligned": False, "communication_data_type": "bf16"}
    [rank, _] = run_distributed(fit_all, 2, STAGES, TinyLM, "bf16-mixed", strategy, {}, timeout=120)
    for stage in STAGES:
        assert rank[stage]["reductions"] == {torch.bfloat16}, stage


def test_a_parameter_that_no_loss_uses_decays() -> None:
    """The one difference: ZeRO's flat gradients have zeros where torch has no gradient, so that AdamW still decays."""
    [rank, _] = run_distributed(fit_all, 2, ["full", *STAGES], Unused, "32-true", {}, {}, timeout=120)
    for stage in STAGES:
        assert differences(rank["full"]["parameters"], rank[stage]["parameters"]).keys() == {
            "never.weight",
            "never.bias",
        }
    assert differences(rank["zero_1"]["parameters"], rank["zero_3"]["parameters"]) == {}


class Sometimes(TinyLM):
    """A block that every other batch goes around; without momentum and decay, no gradient means no step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        around = batch_idx % 2 == 1
        skipped = self.blocks[1].register_forward_hook(lambda _, args, output: args[0]) if around else None
        try:
            return super().training_step(batch, batch_idx)
        finally:
            if skipped is not None:
                skipped.remove()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_without_a_gradient_does_not_take_an_old_one(precision: str) -> None:
    check_equal([*STAGES, "zero_1_offload", *OFFLOADED], Sometimes, precision)


# A whole life


class Start(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.parameters = all_parameters(trainer)


def live(engine: str, precision: str) -> dict[str, Any]:
    """Fit, validate, test, predict uneven numbers of batches, and fit again with another Trainer."""
    pl.seed_everything(1, verbose=False)
    module, first, start, second = TinyLM(), Final(), Start(), Final()
    data = loader(count=36, shuffle=False)
    # The Trainer's own flag becomes bf16-mixed on CPU.
    given = {"plugins": [ShardPrecision(precision)]} if precision.startswith("16") else {"precision": precision}
    loop = quiet_trainer(
        strategy=ENGINES[engine](aligned=True),
        **given,
        max_steps=4,
        val_check_interval=4,
        callbacks=[first],
    )
    loop.fit(module, loader(), data)
    result = {
        "fitted": loop.callback_metrics["val_loss"].item(),
        "validated": loop.validate(module, data, verbose=False)[0]["val_loss"],
        "tested": loop.test(module, data, verbose=False)[0]["test_loss"],
        "predicted": [part.tolist() for part in loop.predict(module, data)],
    }
    again = quiet_trainer(strategy=ENGINES[engine](aligned=True), **given, max_steps=3, callbacks=[start, second])
    again.fit(module, loader())
    assert differences(first.parameters, start.parameters) == {}
    return {**result, "parameters": second.parameters, "losses": module.losses}


def live_all(engines: list[str], precision: str) -> dict[str, Any]:
    linear, embedding = functional.linear, functional.embedding
    found = {}
    for engine in engines:
        found[engine] = live(engine, precision)
        assert (functional.linear, functional.embedding) == (linear, embedding)
    return found


IN_MATRIX = [pytest.param(precision, marks=pytest.mark.matrix) for precision in ("32-true", "16-mixed", "16-true")]


@pytest.mark.parametrize("precision", ["bf16-mixed", *IN_MATRIX])
def test_a_whole_life_is_that_of_fsdp(precision: str) -> None:
    engines = ["full", *STAGES, *OFFLOADED, *(["zero_0"] if precision == "32-true" else [])]
    for rank in run_distributed(live_all, 2, engines, precision, timeout=300):
        expected = rank.pop("full")
        for engine, run in rank.items():
            assert differences(run.pop("parameters"), expected["parameters"]) == {}, engine
            assert run == {key: value for key, value in expected.items() if key != "parameters"}, engine


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_whole_life_at_four_processes(precision: str) -> None:
    # Four gradients are summed in another order: a few roundings of fp32, or a parameter that rounds to its neighbour
    # in bf16, after seven steps of 1e-2.
    atol = 1e-4 if precision == "32-true" else 2e-2
    for rank in run_distributed(live_all, 4, ["full", *STAGES, *OFFLOADED], precision, timeout=500):
        expected = rank.pop("full")
        for engine, run in rank.items():
            for name, value in expected["parameters"].items():
                torch.testing.assert_close(run["parameters"][name], value, rtol=0, atol=atol, check_dtype=False)
            assert run["losses"] == pytest.approx(expected["losses"], abs=atol), engine
            assert run["validated"] == pytest.approx(expected["validated"], abs=atol), engine


def test_plain_stage_3_leaves_the_process_as_it_was() -> None:
    """Asked to, DeepSpeed replaces `torch.nn.functional.linear`; the next run must not see it."""
    run_distributed(_plain_then_fsdp, 2)


def _plain_then_fsdp() -> None:
    linear = functional.linear
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(functional.linear)

    before = fit("full", TinyLM, "32-true", {}, {})
    strategy = ShardDeepSpeedStrategy(stage=3, config={"zero_optimization": {"memory_efficient_linear": True}})
    quiet_trainer(strategy=strategy, max_steps=1, callbacks=[Look()]).fit(TinyLM(), loader())
    assert seen != [linear]
    assert functional.linear is linear
    assert differences(fit("full", TinyLM, "32-true", {}, {})["parameters"], before["parameters"]) == {}


def saved_after(engine: str, folder: str) -> None:
    """What is saved in a fit's last step, and after the fit."""
    last = ModelCheckpoint(dirpath=folder, filename=f"{engine}-in", every_n_train_steps=3)
    trainer = quiet_trainer(
        strategy=ENGINES[engine](aligned=True),
        precision="bf16-mixed",
        max_steps=3,
        callbacks=[last],
        enable_checkpointing=True,
    )
    trainer.fit(TinyLM(), loader())
    trainer.save_checkpoint(f"{folder}/{engine}-after.ckpt")


def test_a_checkpoint_is_saved_after_the_fit_too(tmp_path: Path) -> None:
    for engine in ["full", *STAGES, *OFFLOADED]:
        run_distributed(saved_after, 2, engine, str(tmp_path))
        inside, after = (read_manifest(tmp_path / f"{engine}-{when}.ckpt") for when in ("in", "after"))
        assert inside.tensors == after.tensors
        tensors = [stored(tmp_path / f"{engine}-{when}.ckpt") for when in ("in", "after")]
        assert differences(*tensors) == {}


# Configuration in a run

SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}


def described(stage: int) -> tuple[list[float], list[float], dict[str, Any]]:
    pl.seed_everything(1, verbose=False)
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    module = WithoutOptimizer()
    trainer = quiet_trainer(
        strategy=ShardDeepSpeedStrategy(stage=stage, aligned=True, config=SECTIONS),
        max_steps=5,
        accumulate_grad_batches=2,
        callbacks=[Rates()],
    )
    trainer.fit(module, loader())
    return module.losses, rates, trainer.strategy.deepspeed_config


def test_optimizer_and_schedule_of_the_configuration() -> None:
    for stage in (1, 2, 3):
        losses, rates, config = run_distributed(described, 2, stage)[0]
        assert len(losses) == 10
        # DeepSpeed's warm-up over 3 steps to the optimizer's rate: by the logarithm of the number of steps done.
        assert rates == pytest.approx([0.0, 0.0, 1e-2 * math.log(2) / math.log(3), 1e-2, 1e-2])
        assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (4, 16)
        assert config["gradient_accumulation_steps"] == 2


# Bytes


def count_bytes(stage: int, offload: bool) -> dict[str, int]:
    """Bytes that this rank holds in live tensors, at the point of the step where there are most."""
    found: dict[str, int] = {}

    class Count(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            running = trainer.strategy._running
            parameters = [p.ds_tensor if stage == 3 else p for p in module.parameters() if p.requires_grad]
            found["parameters"] = sum(p.numel() * p.element_size() for p in parameters)
            gradients = trainer.strategy._gradients(trainer.optimizers[0])
            found["gradients"] = sum(g.numel() * g.element_size() for g in gradients)
            found["masters"] = sum(group.flat.numel() * group.flat.element_size() for group in running.groups)

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            states = [value for slots in trainer.optimizers[0].state.values() for value in slots.values()]
            found["state"] = sum(v.numel() * v.element_size() for v in states if v.ndim > 0)
            found["elements"] = sum(
                full_tensor(trainer, n).numel() for n, p in module.named_parameters() if p.requires_grad
            )

    host = OptimizerOffload(device="cpu") if offload else None
    strategy = ShardDeepSpeedStrategy(
        stage=stage, aligned=True, offload_optimizer=host, buckets=ZeroBuckets(reduce=1000, allgather=1000)
    )
    trainer = quiet_trainer(strategy=strategy, precision="bf16-mixed", max_steps=1, callbacks=[Count()])
    trainer.fit(TinyLM(width=16), loader())
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_bytes_are_those_of_the_zero_paper(ranks: int) -> None:
    """Of P parameters a rank holds, in bf16 with Adam (arXiv 1910.02054, 3.1): 2 bytes of each parameter, 4 of its
    gradient in the contract's fp32, 4 of its master and 8 of Adam's moments, each divided by the ranks from the stage
    on that cuts it.
    """
    for stage, offload in [(1, False), (2, False), (3, False), (2, True)]:
        for found in run_distributed(count_bytes, ranks, stage, offload):
            count = found["elements"]
            # A rank's part is padded: stages 1 and 2 once per group, stage 3 once for each of some 20 parameters.
            padding = 32 if stage == 3 else 4
            own = count / ranks
            assert own <= found["masters"] / 4 <= own + padding
            assert found["state"] == 2 * found["masters"]
            assert own <= found["gradients"] / 4 <= own + padding
            if stage == 3:
                assert own <= found["parameters"] / 2 <= own + padding
            else:
                assert found["parameters"] == 2 * count


def second_copies() -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            for p in module.parameters():
                if p.ds_secondary_tensor is not None:
                    found.append((p.ds_numel, p.ds_tensor.numel(), p.ds_secondary_tensor.numel()))

    strategy = ShardDeepSpeedStrategy(
        stage=3,
        zero_plus_plus=ZeroPlusPlus(hpz_partition_size=2),
        # Small parameters would stay whole, and need no copy.
        stage3=Stage3Options(param_persistence_threshold=0),
    )
    quiet_trainer(strategy=strategy, max_steps=1, callbacks=[Look()]).fit(TinyLM(), loader())
    return found


def test_hpz_keeps_a_second_copy_of_the_parameters_that_fewer_ranks_share() -> None:
    for found in run_distributed(second_copies, 4):
        assert found
        for whole, piece, second in found:
            assert piece == -(-whole // 4)
            assert second in (2 * piece, -(-whole // 2))


# Whole tensors by name


def read_and_write(engine: str, precision: str) -> dict[str, Any]:
    """Sizes that do not divide by 3 ranks; every rank gives the same values."""
    pl.seed_everything(1, verbose=False)
    seen: dict[str, Any] = {}

    class Touch(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 1:
                gradient = full_tensor(trainer, "blocks.1.up.weight", "gradient")
                seen["gradient"] = gradient
                set_full_tensor(trainer, "blocks.1.up.weight", gradient * 2, "gradient")
                seen["doubled"] = full_tensor(trainer, "blocks.1.up.weight", "gradient")
                set_full_tensor(trainer, "head.weight", torch.ones(VOCAB, 12))
                moment = full_tensor(trainer, "blocks.0.down.bias", "exp_avg")
                set_full_tensor(trainer, "blocks.0.down.bias", moment.sign() * 0.5, "exp_avg")

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 1:
                assert full_tensor(trainer, "frozen", "exp_avg") is None
                with pytest.raises(ConfigurationError, match=r"no parameter 'head.wieght'. Did you mean head.weight"):
                    full_tensor(trainer, "head.wieght")
                with pytest.raises(ConfigurationError, match=r"has shape \(2,\), but must have \(12,\)"):
                    set_full_tensor(trainer, "shift", torch.ones(2))

    module, final = TinyLM(), Final()
    quiet_trainer(
        strategy=ENGINES[engine](aligned=True), precision=precision, max_steps=3, callbacks=[Touch(), final]
    ).fit(module, loader())
    return {**seen, "parameters": final.parameters, "optimizer": final.optimizer, "losses": module.losses}


def read_and_write_all(engines: list[str], precision: str) -> dict[str, Any]:
    return {engine: read_and_write(engine, precision) for engine in engines}


@pytest.mark.parametrize(("ranks", "precision"), [(2, "32-true"), (3, "bf16-mixed")])
def test_whole_tensors_are_read_and_written_alike(ranks: int, precision: str) -> None:
    engines = ["ddp", "full", *STAGES, *OFFLOADED]
    first, *others = run_distributed(read_and_write_all, ranks, engines, precision, timeout=300)
    for engine, run in first.items():
        assert torch.equal(run["doubled"], run["gradient"] * 2)
        assert torch.equal(run["parameters"]["frozen"], first["full"]["parameters"]["frozen"])
        for other in others:
            for part in ("parameters", "optimizer"):
                assert differences(run[part], other[engine][part]) == {}
        # At three ranks the order of a sum depends on the engine.
        for part in ("parameters", "optimizer") if ranks == 2 else ():
            assert differences(run[part], first["full"][part]) == {}, engine


def summarized() -> tuple[int, int]:
    summary = ModelSummary()
    trainer = quiet_trainer(
        strategy=ShardDeepSpeedStrategy(stage=3), max_steps=1, callbacks=[summary], enable_model_summary=True
    )
    module = TinyLM()
    trainer.fit(module, loader())
    found = summary._summary(trainer, module)
    return found.total_parameters, found.trainable_parameters


def test_a_cut_models_parameters_are_counted_whole() -> None:
    module = TinyLM()
    module.configure_model()
    count = sum(p.numel() for p in module.parameters())
    assert run_distributed(summarized, 2) == [(count, count - 12)] * 2


# Refusals, on every rank alike


class TwoOptimizers(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters()), torch.optim.SGD(self.head.parameters())]


class Thaws(TinyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.embed.requires_grad_(batch_idx == 0)


class DropsGradients(TinyLM):
    def on_after_backward(self) -> None:
        self.trainer.optimizers[0].zero_grad()


class Lbfgs(TinyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(kind: type[TinyLM], settings: dict[str, Any], trainer: dict[str, Any]) -> str:
    try:
        strategy = ShardDeepSpeedStrategy(**settings)
        quiet_trainer(strategy=strategy, **{"max_steps": 2, **trainer}).fit(kind(), loader())
    except ConfigurationError as error:
        return str(error)
    return "not refused"


REFUSALS: list[tuple[type[TinyLM], dict[str, Any], dict[str, Any], str]] = [
    (TwoOptimizers, {}, {}, "returns 2 optimizers, but DeepSpeed's engine steps one"),
    (Lbfgs, {}, {}, "returns LBFGS"),
    (Thaws, {}, {}, "frozen or thawed after the fit began"),
    (DropsGradients, {}, {}, "zero_grad was called between a backward pass and the optimizer's step"),
    (WithoutOptimizer, {}, {}, "the DeepSpeed configuration has no optimizer section"),
    (TinyLM, {"mesh": MeshConfig(replicate=2)}, {}, "mesh asks for 2 replicas, but DeepSpeed cuts over all processes"),
    (TinyLM, {"stage": 0, "aligned": True}, {"precision": "bf16-mixed"}, "shard_ddp_aligned"),
    (TinyLM, {"stage": 0}, {"precision": "bf16-mixed"}, "shard_ddp"),
    (TinyLM, {"stage": 3, "accumulate_sync": "boundary"}, {}, "ZeRO stage 3 reduces accumulated gradients after each"),
    (TinyLM, {"stage": 2, "config": {"gradient_clipping": 1.0}}, {}, "gradient_clipping is 1, but the Trainer's"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[3][:30])
def test_what_can_not_work_is_refused(case: tuple[type[TinyLM], dict[str, Any], dict[str, Any], str]) -> None:
    kind, settings, trainer, message = case
    for said in run_distributed(refused, 2, kind, settings, trainer):
        assert message in said


def go_on_elsewhere(first: Callable[..., Any], then: Callable[..., Any]) -> str:
    module = TinyLM()
    quiet_trainer(strategy=first(), max_steps=1).fit(module, loader())
    try:
        quiet_trainer(strategy=then(), max_steps=1).fit(module, loader())
    except ConfigurationError as error:
        return str(error)
    return "not refused"


def test_a_module_that_another_engine_cut_is_refused() -> None:
    zero_3, zero_2, fsdp, ddp = (ENGINES[name] for name in ("zero_3", "zero_2", "full", "ddp"))
    for then in (fsdp, ddp, zero_2):
        assert "were cut by ZeRO-3" in run_distributed(go_on_elsewhere, 2, zero_3, then)[0]
    for then in (zero_3, zero_2):
        assert "was sharded with FSDP2" in run_distributed(go_on_elsewhere, 2, fsdp, then)[0]


class Raises(TinyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise KeyError("on rank 1 alone")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_that_raises_is_not_hidden(stage: int) -> None:
    with pytest.raises(DistributedError, match="on rank 1 alone") as caught:
        run_distributed(fit, 2, f"zero_{stage}", Raises, "32-true", {}, {}, timeout=60)
    assert caught.value.failed[1] == "KeyError"

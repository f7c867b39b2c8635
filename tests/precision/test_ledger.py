"""The ledger says what dtypes are, from live tensors, and the aligned contract is held against it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard.checkpoint.manifest import read_manifest
from lightning_shard.errors import PrecisionContractError
from lightning_shard.mesh import MeshConfig
from lightning_shard.precision import casting
from lightning_shard.precision.ledger import Ledger
from lightning_shard.strategies.base import ShardStrategy
from lightning_shard.strategies.ddp import ShardDDPStrategy
from lightning_shard.strategies.fsdp import ShardFSDPStrategy
from tests.harness import run_distributed
from tests.models import TinyLM, loader, quiet_trainer, whole_parameters

BF16, FP32 = torch.bfloat16, torch.float32

ENGINES: dict[str, Callable[..., ShardStrategy]] = {
    "ddp": ShardDDPStrategy,
    "full": ShardFSDPStrategy,
    "hybrid": lambda **kwargs: ShardFSDPStrategy(mesh=MeshConfig(replicate=2, shard=1), **kwargs),
    "offload": lambda **kwargs: ShardFSDPStrategy(cpu_offload=True, **kwargs),
}


class Zoo(pl.LightningModule):
    """BatchNorm, a buffer as of rotary embeddings, a frozen bf16 backbone with an adapter, a tie and a metric."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.seen: list[float] = []
        self.mean = MeanMetric()

    def configure_model(self) -> None:
        if hasattr(self, "backbone"):
            return
        torch.manual_seed(5)
        width = self.width
        self.backbone = nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(BF16).requires_grad_(False)
        self.adapter = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, width, bias=False)
        self.up.weight = self.down.weight
        # No power of a base is a bf16 number.
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(width) / width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sin(self.frequencies * 100.0).to(x.dtype)
        x = self.norm(self.adapter(self.backbone(x)))
        return self.up(torch.tanh(self.down(x)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.sum().item())
        loss = mse_loss(self(batch).float(), batch.flip(-1))
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def batches(width: int = 8) -> DataLoader[Tensor]:
    return DataLoader(torch.randn(64, width, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]


def assert_nothing_left(module: pl.LightningModule, optimizers: list[torch.optim.Optimizer]) -> None:
    """No hook of the ledger, on modules, tensors, optimizers or in the dispatcher."""
    assert casting.OBSERVERS == []
    assert _get_current_dispatch_mode() is None
    for part in module.modules():
        assert not any("Recorder" in getattr(h, "__qualname__", "") for h in part._forward_pre_hooks.values())
    assert not any(p._backward_hooks for p in module.parameters())
    assert not any(o._optimizer_step_post_hooks for o in optimizers)


def fit(engine: str, module: pl.LightningModule, data: Any, precision: str, steps: int = 1, **kwargs: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    aligned = kwargs.pop("aligned", True)
    strategy = ENGINES[engine](aligned=aligned, **kwargs.pop("strategy", {}))
    trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=steps, **kwargs)
    trainer.fit(module, data)
    assert trainer.global_step == steps
    assert_nothing_left(module, trainer.optimizers)
    return trainer


def ledgers(
    engines: list[str], model: str, precision: str, options: dict[str, Any], given: dict[str, Any]
) -> dict[str, Ledger]:
    result = {}
    for engine in engines:
        module, data = (Zoo(), batches()) if model == "zoo" else (TinyLM(**given), loader())
        result[engine] = fit(engine, module, data, precision, **options).strategy.ledger
    return result


def measured(engines: list[str], model: str, precision: str, given: Any = None, **options: Any) -> dict[str, Ledger]:
    """Every rank's ledgers are equal, and every engine's JSON form is; engine -> rank 0's."""
    first, second = run_distributed(ledgers, 2, engines, model, precision, options, given or {})
    for engine, ledger in first.items():
        assert ledger.to_json() == second[engine].to_json()
        assert json.dumps(ledger.to_json()) == json.dumps(first[engines[0]].to_json())
        assert ledger.reductions
    return first


def stages(ledger: Ledger, name: str) -> dict[str, str]:
    """Stage -> dtype of a tensor; it must have had just one in each."""
    found = ledger.entries[name].stages
    assert all(len(dtypes) == 1 for dtypes in found.values()), found
    return {stage: str(next(iter(dtypes))).removeprefix("torch.") for stage, dtypes in found.items()}


IN_FP32 = dict.fromkeys(["loaded", "prepared", "optimizer", "forward", "backward", "gradient", "step"], "float32")
ADAMW = dict.fromkeys(["state.exp_avg", "state.exp_avg_sq", "state.step"], "float32")
MIXED = {**IN_FP32, **ADAMW, "forward": "bfloat16", "backward": "bfloat16"}


def test_fp32_is_fp32_all_through() -> None:
    for ledger in measured(["ddp", "full"], "tiny", "32-true").values():
        names = {name for name, entry in ledger.entries.items() if entry.kind == "trainable"}
        assert len(names) == 3 + 6 * 3
        assert all(stages(ledger, name) == {**IN_FP32, **ADAMW} for name in names)
        assert ledger.reduced_in == {FP32}


def test_bf16_mixed_of_a_model_loaded_in_bf16() -> None:
    found = measured(list(ENGINES), "tiny", "bf16-mixed", {"dtype": BF16, "tie": True})
    for ledger in found.values():
        assert stages(ledger, "blocks.0.up.weight") == {**MIXED, "loaded": "bfloat16"}
        # On the LightningModule itself, and made after the cast.
        assert stages(ledger, "shift") == MIXED
        assert stages(ledger, "frozen") == {"loaded": "float32", "prepared": "float32", "forward": "bfloat16"} | {
            "step": "float32"
        }
        assert stages(ledger, "blocks.0.scale") == dict.fromkeys(["loaded", "prepared", "step"], "float32")
        assert "head.weight" not in ledger.entries  # the tie's other name
        assert ledger.reduced_in == {FP32}
    assert {r.operation for r in found["ddp"].reductions} == {"allreduce"}
    assert {r.operation for r in found["full"].reductions} == {"reduce_scatter_base"}


def test_frozen_backbone_batch_norm_buffers_and_metrics() -> None:
    for ledger in measured(list(ENGINES), "zoo", "bf16-mixed").values():
        frozen = dict.fromkeys(["loaded", "prepared", "forward", "step"], "bfloat16")
        assert stages(ledger, "backbone.0.weight") == frozen
        assert stages(ledger, "adapter.weight") == stages(ledger, "down.weight") == MIXED
        # From weights that were rounded to bf16, in fp32.
        assert stages(ledger, "norm.weight") == {**IN_FP32, **ADAMW}
        kept = dict.fromkeys(["loaded", "prepared", "step"], "float32")
        assert stages(ledger, "frequencies") == stages(ledger, "norm.running_var") == kept
        assert stages(ledger, "mean.mean_value") == kept
        assert ledger.entries["mean.mean_value"].kind == "metric state"


def test_low_memory_form_shows_what_it_is() -> None:
    for ledger in measured(["ddp", "full"], "tiny", "bf16-true", aligned=False).values():
        assert {*stages(ledger, "head.weight").values()} == {"bfloat16", "float32"}
        low = {stage for stage, dtype in stages(ledger, "head.weight").items() if dtype == "bfloat16"}
        # Loaded in fp32; and AdamW counts its steps in fp32.
        assert low == {*IN_FP32, *ADAMW} - {"loaded", "state.step"}
        assert ledger.reduced_in == {BF16}


@pytest.mark.parametrize("sync", ["micro_batch", "boundary"])
def test_gradients_held_between_micro_batches(sync: str) -> None:
    options = {"accumulate_grad_batches": 2, "strategy": {"accumulate_sync": sync}}
    for ledger in measured(["ddp", "full"], "tiny", "bf16-mixed", **options).values():
        assert stages(ledger, "head.weight") == {**MIXED, "accumulated": "float32"}
        assert stages(ledger, "shift")["accumulated"] == "float32"


def test_modules_outside_of_fsdp_and_recomputed_ones() -> None:
    options = {"ignored_modules": ["LayerNorm"], "activation_checkpointing": "units"}
    ledger = measured(["full"], "tiny", "bf16-mixed", strategy=options)["full"]
    assert stages(ledger, "blocks.1.norm.weight") == stages(ledger, "blocks.1.up.weight") == MIXED
    assert {r.operation for r in ledger.reductions} == {"reduce_scatter_base", "allreduce"}


def test_table_has_a_row_for_each_combination() -> None:
    ledger = measured(["full"], "zoo", "bf16-mixed")["full"]
    lines = ledger.table().splitlines()
    assert lines[0].split()[3:] == [
        *("count", "loaded", "prepared", "optimizer", "forward", "backward", "gradient", "step", "state")
    ]
    assert ["trainable", "3", *["fp32"] * 3, *["bf16"] * 2, *["fp32"] * 3] in [line.split() for line in lines]
    assert ["buffer", "3", "fp32", "fp32", *["-"] * 4, "fp32"] in [line.split()[:9] for line in lines]
    assert lines[-1].startswith("gradients reduced by: reduce_scatter_base fp32 (")
    assert sum(row["count"] for row in ledger.to_json()["tensors"]) == len(ledger.entries)


# The run is not changed


def numbers(engine: str, model: str, precision: str, options: dict[str, Any], installed: bool) -> dict[str, Any]:
    module, data = (Zoo(), batches()) if model == "zoo" else (TinyLM(tie=True, dropout=0.1), loader())
    with pytest.MonkeyPatch.context() as patch:
        if not installed:
            patch.setattr(ENGINES_CLASS[engine], "_begin_ledger", lambda self, module: None)
        trainer = fit(engine, module, data, precision, steps=4, **options)
    assert (trainer.strategy.ledger is not None) == installed
    return {"parameters": whole_parameters(module), "buffers": dict(module.named_buffers()), "seen": module.seen}


ENGINES_CLASS = {name: ShardDDPStrategy if name == "ddp" else ShardFSDPStrategy for name in ENGINES}


def with_and_without(engines: list[str], *args: Any) -> list[dict[str, Any]]:
    return [numbers(engine, *args, installed) for engine in engines for installed in (True, False)]


def assert_equal_numbers(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("parameters", "buffers"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert tensor.dtype == other[part][name].dtype
            assert torch.equal(tensor, other[part][name]), name


@pytest.mark.parametrize(
    ("model", "precision", "options"),
    [
        ("tiny", "32-true", {"gradient_clip_val": 0.05}),
        ("tiny", "bf16-mixed", {"accumulate_grad_batches": 2, "strategy": {"accumulate_sync": "boundary"}}),
        ("zoo", "bf16-mixed", {}),
    ],
)
def test_recording_changes_no_number_and_engines_agree(model: str, precision: str, options: dict[str, Any]) -> None:
    """Also BatchNorm, rotary-like buffers, adapters on a frozen backbone and a tie: the same numbers everywhere."""
    ranks = run_distributed(with_and_without, 2, list(ENGINES), model, precision, options, timeout=240)
    assert ranks[0][0]["seen"] != ranks[1][0]["seen"]
    for runs in ranks:
        for run in runs[1:]:
            assert_equal_numbers(runs[0], run)


@pytest.mark.matrix
def test_compiled_units_are_compiled_and_seen() -> None:
    options = {"strategy": {"compile": True}}
    ranks = run_distributed(with_and_without, 2, ["full"], "tiny", "bf16-mixed", options, timeout=300)
    for recorded, plain in ranks:
        assert_equal_numbers(recorded, plain)
    ledger = measured(["full"], "tiny", "bf16-mixed", **options)["full"]
    assert stages(ledger, "blocks.0.up.weight") == stages(ledger, "head.weight") == MIXED


# The contract


def _bf16_copies(module: TinyLM) -> None:
    copies = [nn.Parameter(p.detach().to(BF16)) for p in module.parameters() if p.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(copies, lr=0.1)  # type: ignore[method-assign]


class LowMomentum(torch.optim.SGD):
    """Keeps its momentum in bf16, as optimizers that save memory do."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=BF16)
        return result


def _bf16_state(module: TinyLM) -> None:
    module.configure_optimizers = lambda: LowMomentum(  # type: ignore[method-assign]
        [p for p in module.parameters() if p.requires_grad], lr=0.1
    )


def _bf16_buffer(module: TinyLM) -> None:
    def cast() -> None:
        module.blocks[1].scale = module.blocks[1].scale.to(BF16)

    module.on_train_start = cast  # type: ignore[method-assign]


def _recast(module: TinyLM) -> None:
    def cast() -> None:
        module.frozen.data = module.frozen.data.to(BF16)

    module.on_train_start = cast  # type: ignore[method-assign]


def _recast_on_rank_1(module: TinyLM) -> None:
    def cast() -> None:
        if dist.get_rank() == 1:
            module.blocks[2].scale = module.blocks[2].scale.to(BF16)

    module.on_train_start = cast  # type: ignore[method-assign]


def _bf16_gradients(module: TinyLM) -> None:
    _plain_sgd(module)

    def replace(optimizer: Any) -> None:
        module.head.weight.grad_dtype = None  # type: ignore[attr-defined]
        module.head.weight.grad = module.head.weight.grad.to(BF16)

    module.on_before_optimizer_step = replace  # type: ignore[method-assign]


def _plain_sgd(module: TinyLM) -> None:
    module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        [p for p in module.parameters() if p.requires_grad], lr=0.1
    )


def _bf16_ddp_hook(module: TinyLM) -> None:
    def compress(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        low = bucket.buffer().to(BF16).div_(2)
        work = dist.all_reduce(low, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0].to(bucket.buffer().dtype))

    # torch compares them with the classes themselves, which they are not under postponed evaluation.
    compress.__annotations__ = {}

    def register() -> None:
        module.trainer.strategy.model.register_comm_hook(None, compress)  # type: ignore[union-attr, operator]

    module.on_train_start = register  # type: ignore[method-assign]


def _bf16_fsdp_hook(module: TinyLM) -> None:
    def reduce_again(gradient: Tensor) -> None:
        low = gradient.to(BF16)
        dist.all_reduce(low)
        gradient.copy_(low)

    def register() -> None:
        module.set_all_reduce_hook(reduce_again)  # type: ignore[operator]

    module.on_train_start = register  # type: ignore[method-assign]


def broken(engines: list[str], precision: str, breaks: list[Callable[[TinyLM], None]]) -> dict[Any, str]:
    """Each run's message, the same under ``aligned``; and what the plain name's ledger says of it."""
    found: dict[Any, str] = {}
    for engine in engines:
        for spoil in breaks:
            module = TinyLM()
            module.configure_model()
            spoil(module)
            strategy = ENGINES[engine](aligned=True)
            trainer = quiet_trainer(strategy=strategy, precision=precision, max_steps=3)
            try:
                trainer.fit(module, loader())
                found[engine, spoil.__name__] = "not caught"
            except PrecisionContractError as error:
                found[engine, spoil.__name__] = str(error)
            assert_nothing_left(module, [])
            assert trainer.global_step <= 1
    return found


def assert_caught(world: list[dict[Any, str]], name: str, *parts: str) -> None:
    messages = {message for rank in world for key, message in rank.items() if key[1] == name}
    assert len({str(sorted(r.items(), key=str)) for r in world}) == 1, "ranks disagree"
    assert messages
    for message in messages:
        assert message.startswith("The aligned precision contract is broken ")
        assert all(part in message for part in parts), message


BREAKS: list[Any] = [_bf16_copies, _bf16_state, _bf16_buffer, _recast, _recast_on_rank_1, _bf16_gradients]


def test_broken_set_ups_are_caught_on_every_rank_alike() -> None:
    world = run_distributed(broken, 2, ["ddp", "full"], "bf16-mixed", BREAKS, timeout=240)
    assert_caught(
        world,
        "_bf16_copies",
        "the start of the fit: optimizer 0, group 0, parameter 0 is bf16 in the optimizer's groups, required is fp32",
        "and 18 more. Build the optimizer in configure_optimizers from self.parameters()",
    )
    assert_caught(world, "_bf16_state", "is bf16 in the optimizer's state 'momentum', required is fp32", "keeps its")
    assert_caught(world, "_bf16_buffer", "step: blocks.1.scale is bf16 at the optimizer step, required is fp32. ")
    assert_caught(world, "_recast", "step: frozen is bf16 at the optimizer step, required is fp32. Remove the code ")
    assert_caught(world, "_recast_on_rank_1", "step: blocks.2.scale is bf16 at the optimizer step, required is fp32. ")
    assert_caught(world, "_bf16_gradients", "step: head.weight is bf16 as the gradient handed to the optimizer, requ")


@pytest.mark.parametrize(("engine", "precision"), [("ddp", "32-true"), ("full", "bf16-mixed")])
def test_a_hook_that_reduces_in_bf16_is_caught(engine: str, precision: str) -> None:
    hook: Any = _bf16_ddp_hook if engine == "ddp" else _bf16_fsdp_hook
    world = run_distributed(broken, 2, [engine], precision, [hook])
    assert_caught(
        world,
        hook.__name__,
        "in the first optimizer step: A gradient, after that of ",
        "in allreduce of ",
        "is bf16 where gradients are reduced over ranks, required is fp32",
        "Remove the hook that casts gradients",
    )


def on_the_plain_name() -> Ledger:
    module = TinyLM()
    module.configure_model()
    _bf16_buffer(module)
    ledger: Ledger = fit("full", module, loader(), "bf16-mixed", steps=2, aligned=False).strategy.ledger
    return ledger


def test_plain_names_only_record() -> None:
    assert stages(run_distributed(on_the_plain_name, 2)[0], "blocks.1.scale")["step"] == "bfloat16"


class Fails(TinyLM):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise RuntimeError("the user's own")


def failing() -> bool:
    module = Fails()
    trainer = quiet_trainer(strategy=ShardFSDPStrategy(aligned=True), precision="bf16-mixed", max_steps=3)
    with pytest.raises(RuntimeError, match="the user's own"):
        trainer.fit(module, loader())
    assert_nothing_left(module, trainer.optimizers)
    return trainer.strategy.ledger.dtypes("head.weight", "forward") == {BF16}  # type: ignore[attr-defined]


def test_an_exception_leaves_no_hook() -> None:
    assert run_distributed(failing, 2) == [True, True]


class Exchanges(TinyLM):
    """A loss over the features of all ranks, whose backward reduces activations in bf16."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        features = self(batch[0]).flatten(1)
        gathered = torch.distributed.nn.functional.all_reduce(features)
        return super().loss(batch) + gathered.float().square().mean()


def exchanging() -> set[torch.dtype]:
    ledger = fit("full", Exchanges(), loader(), "bf16-mixed").strategy.ledger
    reduced: set[torch.dtype] = ledger.reduced_in
    return reduced


def test_activations_that_are_exchanged_are_no_gradients_reduction() -> None:
    assert run_distributed(exchanging, 2) == [{FP32}, {FP32}]


def saved(engine: str) -> tuple[Any, Any]:
    trainer = fit(engine, TinyLM(), loader(), "bf16-mixed", steps=2)
    trainer.save_checkpoint(f"{engine}.ckpt")
    return read_manifest(f"{engine}.ckpt").ledger, trainer.strategy.ledger.to_json()


@pytest.mark.parametrize("engine", ["ddp", "full"])
def test_the_manifest_holds_the_ledger(engine: str) -> None:
    for stored, measured_here in run_distributed(saved, 2, engine):
        assert stored == measured_here
        assert stored["reduction"] == ["float32"]
        assert stored["tensors"][0]["first"] == "frozen"

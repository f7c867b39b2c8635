"""``fp8-mixed``: linear layers that multiply in float8, emulated on CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import ShardPrecision
from lightning_shard.errors import PrecisionError
from lightning_shard.precision.float8 import Float8, check_float8, install_float8
from tests.checkpoint.compare import stored
from tests.harness import run_distributed
from tests.models import Final, TinyLM, quiet_trainer
from tests.strategies.engines import AT_2, BATCH, ENGINES, NORM, TWICE, Mapped, differences

pytest.importorskip("torchao.float8")

STEPS = 10
# The first block's sizes and the head's are no multiples of 16.
CONVERTED = {f"blocks.{block}.{name}.weight" for block in (1, 2) for name in ("up", "down")}


class Even(TinyLM):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(width=16, **kwargs)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            super().configure_model()
            for block in list(self.blocks)[1:]:
                block.up, block.down = nn.Linear(16, 48), nn.Linear(48, 16, bias=False)


class Named(nn.Linear):
    def name(self) -> str:
        return type(self).__name__


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def plugin(precision: str = "fp8-mixed", **float8: Any) -> ShardPrecision:
    settings = {"emulate": True, **float8} if precision == "fp8-mixed" else None
    return ShardPrecision(precision, float8=settings)  # type: ignore[arg-type]


def fit(
    engine: str,
    precision: Mapping[str, Any],
    trainer: Mapping[str, Any],
    *,
    folder: str | None = None,
    resume: str | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    module, final = Even(), Final()
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    loop = quiet_trainer(
        strategy=ENGINES[engine](aligned=True),
        plugins=[plugin(**precision)],
        max_steps=steps,
        callbacks=[final, saving] if folder else [final],
        enable_checkpointing=folder is not None,
        **trainer,
    )
    loop.fit(module, DataLoader(Mapped(), batch_size=BATCH, shuffle=True), ckpt_path=resume)
    ledger = loop.strategy.ledger
    return {
        "parameters": final.parameters,
        "optimizer": final.optimizer,
        "losses": module.losses,
        "products": {name for name in ledger.entries if ledger.dtypes(name, "product")},
        "table": ledger.table(),
    }


def fit_all(engines: list[str], *args: Any) -> dict[str, dict[str, Any]]:
    return {engine: fit(engine, *args) for engine in engines}


def compare(engines: list[str], precision: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Run all engines in the same processes, which see different batches; the first one's run of rank 0."""
    ranks = run_distributed(fit_all, 2, engines, precision, trainer, timeout=300)
    first = ranks[0][engines[0]]
    for rank in ranks:
        for engine, run in rank.items():
            assert run["products"] == CONVERTED, engine
            for part in ("parameters", "optimizer"):
                assert differences(run[part], first[part]) == {}, (engine, part)
            assert run["losses"] == rank[engines[0]]["losses"], engine
    assert first["losses"] != ranks[1][engines[0]]["losses"]
    assert sum(first["losses"][-3:]) < 0.9 * sum(first["losses"][:3])
    return first


def test_engines_agree_bitwise_and_the_ledger_shows_the_layers() -> None:
    run = compare(["ddp", "full", "hybrid_1x2", "zero_3"], {}, NORM)
    [row] = [line.split() for line in run["table"].splitlines() if "fp8" in line]
    # count, loaded, prepared, optimizer, product, gradient, step, state
    assert row[1:] == ["4", *["fp32"] * 3, "fp8", *["fp32"] * 3]
    [other] = run_distributed(fit_all, 1, ["full"], {"precision": "bf16-mixed"}, NORM)
    assert other["full"]["products"] == set()
    assert "product" not in other["full"]["table"]


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_all_engines_agree_in_every_recipe(recipe: str) -> None:
    compare([*AT_2, "zero_1", "zero_2", "zero_3", "zero_3_offload"], {"recipe": recipe}, NORM)
    # Those that reduce every micro-batch's gradients.
    compare([*AT_2, "zero_2", "zero_3"], {"recipe": recipe}, {**NORM, **TWICE})


def resumed(folder: str) -> dict[str, dict[str, Any]]:
    """A run under DDP, and what goes on with its checkpoints: the same precision, another one, and back."""
    bf16 = {"precision": "bf16-mixed"}
    return {
        "straight": fit("ddp", {}, {}, folder=f"{folder}/fp8", steps=6),
        "resumed": fit("full", {}, {}, resume=f"{folder}/fp8/step=3.ckpt", steps=6),
        "switched": fit("full", bf16, {}, resume=f"{folder}/fp8/step=3.ckpt", folder=f"{folder}/bf16", steps=6),
        "back": fit("ddp", {}, {}, resume=f"{folder}/bf16/step=5.ckpt", steps=7),
    }


def test_a_checkpoint_resumes_and_goes_to_bf16_and_back(tmp_path: Path) -> None:
    for runs in run_distributed(resumed, 2, str(tmp_path)):
        assert runs["resumed"]["losses"] == runs["straight"]["losses"][3:]
        assert differences(runs["resumed"]["parameters"], runs["straight"]["parameters"]) == {}
        assert runs["switched"]["losses"] != runs["resumed"]["losses"]
        assert (runs["switched"]["products"], runs["back"]["products"]) == (set(), CONVERTED)
        assert runs["back"]["losses"][0] != runs["switched"]["losses"][2]
    fp8, bf16 = stored(tmp_path / "fp8" / "step=5.ckpt"), stored(tmp_path / "bf16" / "step=5.ckpt")
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} for found in (fp8, bf16)]
    assert shapes[0] == shapes[1]
    assert "model.blocks.1.up.weight" in fp8


def test_a_layer_is_torchaos_and_the_same_module_again_afterwards() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    root = nn.ModuleDict({"a": Named(32, 16), "b": nn.Linear(32, 16), "odd": nn.Linear(32, 17), "own": Own(16, 16)})
    root["tied"], root["twin"] = nn.Linear(16, 32), nn.Linear(16, 32)
    root["twin"].weight = root["tied"].weight
    plain, before = deepcopy(root["a"]), set(vars(root["a"]))
    remove = install_float8(root, Float8(emulate=True, pattern="(?!b).*"), others=[])
    assert {name for name, layer in root.items() if "linear_mm_config" in vars(layer)} == {"a"}
    assert root["a"].name() == "Float8Named"
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    own, x = convert_to_float8_training(nn.Sequential(plain), config=config)[0], torch.randn(8, 32)
    for layer in (root["a"], own):
        layer(x).square().sum().backward()
    assert torch.equal(root["a"](x), own(x))
    assert torch.equal(root["a"].weight.grad, own.weight.grad)
    remove()
    assert not torch.equal(root["a"](x), own(x))
    assert type(root["a"]) is Named
    assert set(vars(root["a"])) == before
    with pytest.raises(PrecisionError, match=r"no nn\.Linear matches float8\.pattern 'odd|twin' whose sizes are"):
        install_float8(root, Float8(emulate=True, pattern="odd|twin"), others=[])


def test_what_can_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrecisionError, match=r"'fp8-mixed' on cpu, but .* 8\.9 or newer .*\{emulate: true\}"):
        pl.Trainer(strategy="shard_fsdp", accelerator="cpu", devices=2, plugins=[ShardPrecision("fp8-mixed")])
    with pytest.raises(PrecisionError, match=r"float8 is set with precision 'bf16-mixed', but goes with 'fp8-mixed'"):
        ShardPrecision("bf16-mixed", float8=Float8()).policy(aligned=False)
    with pytest.raises(PrecisionError, match=r"'fp8-mixed' with autocast: true"):
        ShardPrecision("fp8-mixed", autocast=True).policy(aligned=False)
    with pytest.raises(PrecisionError, match=r"float8\.pattern '\(' is no regular expression: missing \)"):
        ShardPrecision("fp8-mixed", float8={"pattern": "("})  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    gpu = torch.device("cuda", 0)
    check_float8(Float8(emulate=True), gpu, launched=True)
    with pytest.raises(PrecisionError, match=r"on A100 of compute capability 8\.0, but"):
        check_float8(Float8(), gpu, launched=True)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(PrecisionError, match=r"torchao is not installed. Install it: pip install torchao"):
        check_float8(Float8(emulate=True), gpu, launched=False)

"""Planning: sizes as people write them, formulas of traffic, what can't be traced, and the command."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from lightning_shard.commands import plan as plan_command
from lightning_shard.commands import plan_text
from lightning_shard.commands.cli import ShardCLI
from lightning_shard.engines.facts import DeepSpeedFacts, FSDPFacts, TorchDDPFacts
from lightning_shard.engines.units import find_units
from lightning_shard.errors import ConfigurationError
from lightning_shard.meters import fake_tensors
from lightning_shard.planning import link_speeds
from lightning_shard.planning.facts import ModelFacts, OptimizerFacts, ParameterFacts, model_facts
from lightning_shard.planning.largest_batch import MOST_TRACES, Run, Traces, confirmed_batch, largest_batch
from lightning_shard.planning.memory_trace import Step, Trace, TraceError, trace_step
from lightning_shard.planning.predict import predict, predict_account
from lightning_shard.planning.quantities import parse_bytes, parse_flops, parse_speed, show_bytes
from lightning_shard.planning.traffic import Nodes, collectives, step_time
from lightning_shard.precision.policy import policy_from
from tests.harness import ROOT
from tests.models import TinyLM, loader

FP32 = policy_from("32-true", aligned=False)
BF16 = policy_from("bf16-mixed", aligned=False)


# Sizes and speeds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("0.1GB", 10**8),
        ("123B", 123),
        ("141e9B", 141 * 10**9),
        ("192TB", 192 * 10**12),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80", "GB", "80 gigabytes", "80Gb", "-80GB", "0GB", "0.1B", "80GB/s", "8O GB", ""])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "speed"),
    [("400Gb/s", 50e9), ("400Gbps", 50e9), ("50GB/s", 50e9), ("3.2Tb/s", 400e9), ("1GiB/s", 2**30), ("8b/s", 1.0)],
)
def test_speeds(text: str, speed: float) -> None:
    assert parse_speed(text) == speed


@pytest.mark.parametrize("text", ["400", "400Gb", "400G/s", "0GB/s", "fast"])
def test_no_speeds(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_speed(text)


def test_peaks() -> None:
    assert parse_flops("989TFLOPS") == parse_flops("989 TFLOP/s") == parse_flops("9.89e14") == 989e12
    with pytest.raises(ConfigurationError, match="'989 horses' is no peak"):
        parse_flops("989 horses")


def test_shown_sizes() -> None:
    assert [show_bytes(n) for n in (0, 17, 1234, 999_600, 80e9, 1.25e12)] == [
        "0",
        "17 B",
        "1.23 kB",
        "1e+03 kB".replace("1e+03", "1000"),
        "80 GB",
        "1.25 TB",
    ]


# Arithmetic


def model(*sizes: int, units: int = 0) -> ModelFacts:
    """Matrices of these many rows and 10 columns, the last ones in units of their own."""
    names = ["" if i < len(sizes) - units else f"unit {i}" for i in range(len(sizes))]
    return ModelFacts(
        parameters=tuple(
            ParameterFacts(fqn=f"p{i}", shape=(rows, 10), dtype=torch.float32, unit=name)
            for i, (rows, name) in enumerate(zip(sizes, names, strict=True))
        )
    )


def test_bytes_of_the_zero_paper() -> None:
    """Of P parameters with Adam in mixed precision (arXiv 1910.02054, figure 1): 2P + 2P + 12P, cut by stage; here
    gradients are kept in fp32.
    """
    one = model(1000)
    count, ranks = 10_000, 10
    for stage, parameters, gradients, rest in [(1, 1, 1, ranks), (2, 1, ranks, ranks), (3, ranks, ranks, ranks)]:
        device = predict(one, DeepSpeedFacts(ranks=ranks, stage=stage), BF16).step.device
        assert device.parameters == 2 * count // parameters
        assert device.gradients == 4 * count // gradients
        assert device.masters == 4 * count // rest
        assert device.optimizer == 8 * count // rest + 4


def test_padding_of_uneven_cuts() -> None:
    # 7 rows over 4 ranks are 2, 2, 2 and 1, and all are padded to 2.
    assert predict(model(7), FSDPFacts(replicate=1, shard=4), FP32).step.device.parameters == 2 * 10 * 4
    # Of 16 ranks 9 have a row of nothing.
    assert predict(model(7), FSDPFacts(replicate=1, shard=16), FP32).step.device.parameters == 10 * 4
    # ZeRO-3 cuts 70 elements into pieces of 18.
    assert predict(model(7), DeepSpeedFacts(ranks=4, stage=3), FP32).step.device.parameters == 18 * 4
    # ZeRO-1 and -2 pad the whole to twice the ranks.
    assert predict(model(7), DeepSpeedFacts(ranks=4, stage=2), FP32).step.device.masters == 18 * 4


def test_offload_moves_bytes_and_adds_none_on_the_device() -> None:
    here = predict_account(model(100, 50, units=1), FSDPFacts(replicate=1, shard=2), BF16)
    away = predict_account(model(100, 50, units=1), FSDPFacts(replicate=1, shard=2, cpu_offload=True), BF16)
    assert (away.device.parameters, away.device.optimizer) == (0, 0)
    assert (away.host.parameters, away.host.optimizer) == (here.device.parameters, here.device.optimizer)


def test_ranks_cost_nothing() -> None:
    many = model(*[1000] * 400, units=399)
    few, most = (
        predict(many, engine(ranks), BF16).step.device.parameters
        for engine in (lambda n: FSDPFacts(replicate=1, shard=n),)
        for ranks in (8, 16384)
    )
    assert (few, most) == (400 * 125 * 10 * 4, 400 * 10 * 4)


# Traffic


def test_traffic_of_a_ring() -> None:
    nodes = Nodes(nodes=2, devices=4)
    (reduced,) = collectives(model(800), TorchDDPFacts(ranks=8), FP32)
    # 2 (k - 1) / k of 32,000 bytes from each rank, and over each node's edge once.
    assert (reduced.kind, reduced.sent) == ("all-reduce", 2 * 7 / 8 * 32_000)
    assert reduced.inside(nodes) == reduced.between(nodes) == reduced.sent


def test_traffic_of_hybrid_sharding() -> None:
    nodes = Nodes(nodes=2, devices=4)
    sent = {c.axis + " " + c.what: c for c in collectives(model(800), FSDPFacts(replicate=2, shard=4), BF16)}
    # The root is gathered once in a step: all its rows in bf16, inside the node alone.
    gathered = sent["shard parameters, forward"]
    assert (gathered.inside(nodes), gathered.between(nodes)) == (3 / 4 * 16_000, 0)
    # Each of a node's four devices all-reduces its quarter with one other node: fp32.
    shards = sent["replicate gradient shards"]
    assert (shards.inside(nodes), shards.between(nodes)) == (0, 4 * 2 * 1 / 2 * 8_000)


def test_step_time_says_what_binds() -> None:
    nodes = Nodes(nodes=2, devices=4)
    sent = collectives(model(800), TorchDDPFacts(ranks=8), FP32)
    slow = step_time(sent, nodes, flops=1e6, peak=1e9, inside=1e12, between=1e6)
    assert (slow.bound, slow.expected) == ("the links between nodes", 0.056)
    assert step_time(sent, nodes, flops=1e9, peak=1e9, inside=1e12, between=1e6).bound == "compute"


# Tracing


def trace(module: pl.LightningModule, *, mode: Any = None, **kwargs: Any) -> Any:
    mode = mode or fake_tensors.fake_mode()
    fake_tensors.make_fake(module, mode)
    module.__dict__["log"] = lambda *args, **kwargs: None
    step = Step(loss=lambda b: module.training_step(b, 0), batch=next(iter(loader())), units=find_units(module, "auto"))
    return trace_step(module, step, BF16, mode, **kwargs)


def test_a_trace_leaves_the_module_as_it_was() -> None:
    module = TinyLM(tie=True)
    module.configure_model()
    before = {name: (p.dtype, p.shape) for name, p in module.named_parameters()}
    found = trace(module)
    assert {name: (p.dtype, p.shape) for name, p in module.named_parameters()} == before
    assert module.head.weight is module.embed.weight
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    assert found.order == ("blocks.0", "blocks.1", "blocks.2")
    # All but the loss and the batch is freed.
    assert found.segments[-1].end < 1000
    # A product and its two gradients.
    assert found.backward_flops == 2 * found.forward_flops


def test_activations_grow_with_the_batch() -> None:
    module = TinyLM()
    module.configure_model()
    mode = fake_tensors.fake_mode()
    traces = [trace(module, mode=mode, scale=scale) for scale in (1, 2, 8)]
    assert [t.batch_size for t in traces] == [4, 8, 32]
    known = Traces(one=traces[0], two=traces[1])
    assert known.scales
    expected, found = traces[2].segments, known.at(32).segments
    assert [(s.phase, s.unit, s.done) for s in found] == [(s.phase, s.unit, s.done) for s in expected]
    # Where a part's most is now one moment and now another, which small parts show, a line lies below it.
    assert max(s.activations for s in found) == pytest.approx(max(s.activations for s in expected), rel=0.01)
    assert known.at(32).flops == traces[2].flops


def test_the_largest_batch_is_confirmed_by_its_own_trace() -> None:
    module = TinyLM()
    module.configure_model()
    mode = fake_tensors.fake_mode()
    one, two = (trace(module, mode=mode, scale=scale) for scale in (1, 2))
    facts = model_facts(module, units=find_units(module, "auto"))
    run = Run(model=facts, policy=FP32, optimizer=OptimizerFacts(), traces=Traces(one=one, two=two))
    engine = TorchDDPFacts(ranks=1)
    sizes: list[int] = []

    def steep(batch: int) -> Trace:
        """Twice what the line through the two small batches says."""
        sizes.append(batch)
        found = run.traces.at(batch)
        doubled = [replace(s, activations=2 * s.activations, together=2 * s.together) for s in found.segments]
        return replace(found, segments=tuple(doubled))

    memory = run.peak(engine, 100).device.total
    assert largest_batch(run, engine, memory) == 100
    batch, after, confirmed = confirmed_batch(run, engine, memory, steep)
    assert confirmed
    assert 45 <= batch <= 50
    for size, fits in ((batch, True), (batch * 5 // 4, False)):
        assert size in sizes
        assert (after.peak(engine, size).device.total <= memory) is fits
    assert len(sizes) <= MOST_TRACES
    # Where the line is right, one look is enough.
    assert confirmed_batch(run, engine, memory, run.traces.at)[0::2] == (100, True)


class Attending(pl.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3 * 64)
        self.whole = nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True)
        self.dropout = dropout

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layer(torch.eye(8).expand(4, 32, 8, 8).flatten(1, 2))
        q, k, v = x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.whole(*[y.transpose(1, 2).flatten(2)] * 3, need_weights=False)[0].sum()


def test_dropout_in_attention_keeps_no_scores() -> None:
    with_it, without = (max(s.activations for s in trace(Attending(p)).segments) for p in (0.1, 0.0))
    assert with_it == without
    # The scores of 256 times 256 pairs alone would be more.
    assert without < 4 * 4 * 256 * 256 * 2 * 2


class Peculiar(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].float()
        if self.how == "size":
            x = x[: int(batch[0].sum())]
        elif self.how == "branch" and batch[0].any():
            x = x + 1
        elif self.how == "mask":
            x = x[batch[0] > 3]
        elif self.how == "kernel":
            x = _kernel(x)
        return self.layer(x).sum()


@torch.library.custom_op("plan_tests::kernel", mutates_args=())
def _kernel(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("how", "operation"),
    [
        ("size", "_local_scalar_dense"),
        ("branch", "_local_scalar_dense"),
        ("mask", "nonzero|index"),
        ("kernel", "plan_tests.kernel"),
    ],
)
def test_what_can_not_be_traced_is_named(how: str, operation: str) -> None:
    with pytest.raises(TraceError, match=rf"operation \S*({operation}).*test_plan\.py:\d+"):
        trace(Peculiar(how))


def test_the_fake_world_is_of_any_size() -> None:
    with fake_tensors.fake_world(16384):
        assert torch.distributed.get_world_size() == 16384
        gathered = [torch.empty(2) for _ in range(4)]
        torch.distributed.all_reduce(gathered[0])
    assert not torch.distributed.is_initialized()


# The command


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert plan_command.main(["--device-memory", "80GB", *arguments]) == 0
    return capsys.readouterr().out


GPT = ["--config", str(ROOT / "configs/base.yaml"), "--data.init_args.limit_bytes=100000"]
FAST = ["--intra-node", "450GB/s", "--inter-node", "400Gb/s", "--device-name", "NVIDIA H100 80GB HBM3"]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    more = ["--trainer.precision=bf16-mixed", "--compare", "--picture", str(picture)]
    out = plan(capsys, "--nodes", "4", "--devices", "8", *FAST, *GPT, *more)
    assert "shard_fsdp, bf16-mixed, 4 x 8 devices, batch 8 per device: 131,712 parameters" in out
    assert re.search(r"^fits: .* at the peak, in the \w+ ", out, re.MULTILINE)
    assert re.search(r"^largest batch per device: \d+", out, re.MULTILINE)
    assert "fewest devices for this batch: 1 x 1" in out
    assert re.search(r"^all-gather, parameters, backward +shard +32 ", out, re.MULTILINE)
    assert "a step takes about" in out
    assert "hybrid sharding (shard_fsdp_hybrid) would send" in out
    forms = ("shard_fsdp + checkpointing", "shard_fsdp + selective checkpointing")
    for name in ("shard_ddp", *forms, "shard_deepspeed_stage_3_offload_nvme"):
        assert re.search(rf"^{re.escape(name)} .* yes ", out, re.MULTILINE), name
    assert "not planned: shard_deepspeed_stage_0: precision is 'bf16-mixed'" in out
    assert "note:" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    check_yaml(out, tmp_path)


def check_yaml(out: str, folder: Path) -> None:
    """What is recommended is what the package's parser takes."""
    text = out[out.index("\ntrainer:\n") :].partition("\n\n")[0]
    content = yaml.safe_load(text)
    assert content["trainer"]["num_nodes"] == 4
    # There is no GPU to start on.
    content["trainer"] |= {"accelerator": "cpu"}
    (folder / "trainer.yaml").write_text(yaml.safe_dump(content))
    read = ShardCLI(
        args=["--config", str(ROOT / "configs/base.yaml"), "--config", str(folder / "trainer.yaml")], run=False
    )
    assert type(read.trainer.strategy).__name__ == content["trainer"]["strategy"]["class_path"].rpartition(".")[2]


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device-memory", "5MB", "--reserve", "1B", "--compare"]
    # The configuration has two devices.
    out = plan(capsys, *small, *GPT)
    assert out.startswith("shard_fsdp, 32-true, 1 x 2 devices")
    assert re.search(r"^does not fit: .* at the peak, in the .* of 5 MB", out, re.MULTILINE)
    assert re.search(r"^largest batch per device: [1-7]$", out, re.MULTILINE)
    assert "recommendation: nothing fits" in out


def test_without_activations(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--devices", "2", *GPT, "--no-trace")
    assert out.startswith("note: ESTIMATE WITHOUT ACTIVATIONS: --no-trace was given")
    assert not re.search(r"^activations ", out, re.MULTILINE)


class Masked(TinyLM):
    """A step that depends on its data."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = batch[0][batch[1].sum(1) > 3]
        return self(kept).sum()


class NoData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        raise FileNotFoundError("shards/part-0.bin")


def test_estimates_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--trainer.strategy=shard_deepspeed_stage_2", "--trainer.accelerator=cpu"]
    out = plan(capsys, *own, "--model=tests.planning.test_plan.Masked", "--data=tests.planning.test_plan.NoData")
    assert "ESTIMATE WITHOUT ACTIVATIONS" in out
    assert "FileNotFoundError: shards/part-0.bin" in out
    out = plan(capsys, *own, "--model=tests.planning.test_plan.Masked", "--data=tests.planning.test_plan.Words")
    assert "ESTIMATE WITHOUT ACTIVATIONS" in out
    assert re.search(r"operation aten\.\S*(nonzero|index)", out)


class Words(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes is 0, but must be 1 or more"),
        (["--efficiency", "2"], "--efficiency is 2"),
        (["--reserve", "90GB"], "--reserve leaves nothing"),
        (["--device-peak", "1e12", "--device-name", "H100"], "give one of them"),
        (["--links", "links.json", "--inter-node", "50GB/s"], "--links links.json and --inter-node both say"),
        ([*GPT, "--trainer.strategy=ddp"], "trainer.strategy is 'ddp'.*--trainer.strategy shard_ddp"),
        ([*GPT, "--device-name", "abacus"], "the peak of 'abacus' is not known"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_command.main(["--device-memory", "80GB", *arguments])


def test_measured_links(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    link_speeds.write(link_speeds.Links(intra_node=450e9, inter_node=None), path)
    options = plan_command.parser().parse_args(["--device-memory", "80GB", "--links", str(path)])
    plan_command.check(options)
    plan_text.take_links(options, Nodes(nodes=1, devices=8))
    assert (options.intra_node, options.inter_node) == (450e9, None)
    with pytest.raises(ConfigurationError, match="has no link between nodes, and the run is on 2 x 2 devices"):
        plan_text.take_links(options, Nodes(nodes=2, devices=2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file or directory.*doctor --output"),
        ("intra_node: 5", "has no speeds of links in it"),
        ("[1, 2]", "has no speeds of links in it"),
        (
            '{"format": "links 2", "intra_node_bytes_per_second": 1, "inter_node_bytes_per_second": 1}',
            "has no speeds of links in it .format 'lightning_shard links 1'",
        ),
        (
            '{"format": "lightning_shard links 1", "inter_node_bytes_per_second": 1}',
            "intra_node_bytes_per_second is None",
        ),
        (
            '{"format": "lightning_shard links 1", "intra_node_bytes_per_second": "5GB/s"}',
            "intra_node_bytes_per_second is '5GB/s', but is a number",
        ),
    ],
)
def test_no_measured_links(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        plan_command.main(["--device-memory", "80GB", "--links", str(path)])


def test_a_size_without_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_command.main(["--device-memory", "80"])
    assert "'80' is no size. Write a number and a unit: 80GB" in capsys.readouterr().err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"--picture needs matplotlib.*examples"):
        plan_command.main(["--device-memory", "80GB", "--picture", "plan.png", *GPT])

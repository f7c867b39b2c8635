"""``lightning-shard plan``: predict memory per device, traffic and time of a run before it is queued."""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_shard import registry
from lightning_shard.commands import plan_inputs
from lightning_shard.commands.options import add_output, count, options_parser, refuse_to_replace, write_output
from lightning_shard.commands.plan_inputs import Inputs
from lightning_shard.errors import ConfigurationError, ShardError, raise_problems
from lightning_shard.meters.peaks import Peaks, find_peaks, peak_flops
from lightning_shard.planning import report
from lightning_shard.planning.memory_trace import batch_size_of, resized
from lightning_shard.planning.operators import Device
from lightning_shard.planning.planner import Candidate, Form, forms, ranked
from lightning_shard.planning.report import FORMS, Row, recommend
from lightning_shard.planning.step_time import LINK_REACHED, Rates, device_of
from lightning_shard.planning.traffic import Links, Nodes, read_links
from lightning_shard.strategies.strategy import ShardStrategy
from lightning_shard.text import columns, parse_bytes, parse_flops, parse_speed, show_bytes

SHOWN = 8  # The best forms of a search that are printed.

_DESCRIPTION = """\
Predict a run before it is queued, on any machine: memory per device by kind and at which point of the step,
the largest batch, the fewest devices, bytes over the network and the expected time of a step. One training step runs on
tensors without data. Other options are the options of fit:
lightning-shard plan --nodes 4 --devices 8 --device-memory 80GB --config run.yaml --data.init_args.batch_size 16
Without a LightningModule, first of all a Hugging Face configuration (config.json, its folder, or a class):
lightning-shard plan transformers.LlamaConfig --devices 8 --device-memory 80GB --batch-size 2 --seq-len 4096
"""


def parser() -> argparse.ArgumentParser:
    parser = options_parser("plan", _DESCRIPTION)
    add = parser.add_argument
    add("--nodes", type=count, help="nodes of the run (default: the configuration's num_nodes)")
    add("--devices", type=count, help="devices, and so processes, on each node (default: the configuration's, or 1)")
    size, speed, peak = (partial(_argument, parse) for parse in (parse_bytes, parse_speed, parse_flops))
    add("--device-memory", type=size, required=True, metavar="SIZE", help="memory of a device: 80GB, 80GiB")
    add("--compare", action="store_true", help="all engines of the package, with and without activation checkpointing")
    add("--wide", action="store_true", help="--compare with bytes by kind, fewest devices and the time's bound too")
    add("--search", action="store_true", help="the fastest form that keeps the global batch and fits, as a whole YAML")
    add("--global-batch", type=count, help="samples of a step of all devices, for --search (default: the run's)")
    add_output(parser, "with --search: write its YAML here, and do not print it")
    add("--batch-size", type=count, help="samples per device and micro-batch (default: as in the data's first batch)")
    add("--seq-len", type=count, help="tokens of a sample of a Hugging Face configuration (default: its most, or 2048)")
    add("--task", help="task of a Hugging Face configuration (default: by its architectures, else causal-lm)")
    add("--intra-node", type=speed, metavar="SPEED", help="of a device's links inside its node: 450GB/s")
    add("--inter-node", type=speed, metavar="SPEED", help="of a node's links to others, all together: 400Gb/s")
    add("--links", type=Path, metavar="FILE", help="both speeds, as doctor --output FILE measured them in all-gathers")
    add("--device-peak", type=peak, metavar="FLOPS", help="of a device in the compute dtype: 989TFLOPS")
    add("--device-name", metavar="NAME", help="the device, whose peak is known: H100")
    add("--picture", type=Path, metavar="FILE", help="draw the bytes by kind into a file (needs matplotlib)")
    add("--no-trace", action="store_true", help="do not run the step: an estimate without activations")
    return parser


def _argument(parse: Callable[[str], float], text: str) -> float:
    """Parse an option, and give argparse the message of an error."""
    try:
        return parse(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: Sequence[str]) -> int:
    print(make_plan(arguments).text)
    return 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's predicted memory, traffic and time."""

    configured: Row
    """The run as it is configured: bytes at the points of a step, largest batch, fewest devices, traffic, time."""

    memory: int
    """Bytes of a device that the run may use."""

    others: tuple[Row, ...] = ()
    """With ``compare``: the engines of the package, or the reason why one is refused."""

    best: Row | None = None
    """The recommended one of ``others``."""

    text: str = ""
    """The output of the command."""

    @property
    def fits(self) -> bool:
        """True if the run as configured surely fits into a device."""
        return self.configured.verdict(self.memory) == "fits"


def make_plan(arguments: Sequence[str]) -> Plan:
    # The model is the first word: a word behind an option would be read as the option's value.
    model = arguments[0] if arguments and not arguments[0].startswith("-") else None
    options, rest = parser().parse_known_args(arguments if model is None else arguments[1:])
    if model is None and rest and not rest[0].startswith("-"):
        raise ConfigurationError(
            f"{rest[0]} stands behind options: a model is the first word, as in plan {rest[0]} ..."
        )
    raise_problems(_problems(options))
    refuse_to_replace(options.output, options.force)
    refuse_to_replace(options.picture, force=True)
    if model is not None:
        rest = [*_hugging_face(model, options), *rest]
    measured = None if options.links is None else read_links(options.links)
    # DeepSpeed's logger keeps the stdout of its import.
    with contextlib.redirect_stdout(sys.stderr):
        inputs = plan_inputs.read_inputs(rest, options.device_memory, nodes=options.nodes, devices=options.devices)
        return _plan(options, inputs, measured)


def _hugging_face(model: str, options: argparse.Namespace) -> list[str]:
    """Return the options of fit that train a Hugging Face configuration. The user's options come after them."""
    own = {"config": model, "task": options.task}
    given = {
        "model": "lightning_shard.hugging_face.HuggingFace",
        "data": "lightning_shard.hugging_face.HuggingFaceData",
        **{f"{part}.{key}": value for part in ("model", "data") for key, value in own.items()},
        "data.batch_size": options.batch_size or 1,
        "data.seq_len": options.seq_len,
        "trainer.strategy": "shard_fsdp",
        "trainer.precision": "bf16-mixed",
    }
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield contradictions and impossible values among the options."""
    if options.search and not (options.device_name or options.device_peak or options.links):
        yield "--search compares times: say the device by --device-name H100 or --device-peak"
    if options.device_peak is not None and options.device_name is not None:
        yield "--device-peak and --device-name both say the peak: give one of them"
    speeds = " and ".join(f"--{n}-node" for n in ("intra", "inter") if getattr(options, f"{n}_node") is not None)
    if options.links is not None and speeds:
        yield f"--links {options.links} and {speeds} both say how fast links are: give the file, or the speeds"
    if options.picture is not None and importlib.util.find_spec("matplotlib") is None:
        install = "pip install 'lightning-shard[examples]'. Without --picture the plan is printed"
        yield f"--picture needs matplotlib, which is not installed: {install}"


def _plan(options: argparse.Namespace, inputs: Inputs, measured: Links | None) -> Plan:
    _read_step(options, inputs, measured)
    nodes, memory, strategy = inputs.nodes, inputs.memory, inputs.strategy
    own = _candidate(inputs, inputs.name, strategy)
    configured = inputs.row(replace(own, checkpointing=strategy.activation_checkpointing), confirm=True)
    if configured.refused:
        raise ConfigurationError(configured.refused)
    parts = [_title(inputs, configured), report.by_kind(configured.points), report.describe_fit(configured, memory)]
    if nodes.ranks > 1 and not own.engine.replicates:
        count, units = sum(p.numel() for p in inputs.module.parameters()), len(own.engine.units(inputs.module)) + 1
        parts += filter(None, [report.advice(count, units, memory)])
    parts.append(report.traffic(configured.sent, nodes))
    parts += [report.timing(configured.time)] if configured.time else []
    rows, best = [replace(configured, name="as configured")], None
    if options.compare:
        rows += [inputs.row(each) if isinstance(each, Candidate) else each for each in _candidates(inputs)]
        parts.append(report.comparison(rows, memory, wide=options.wide))
        best, reason = recommend(rows[1:], memory=memory, nodes=nodes)
        parts.append(f"recommendation: {reason}")
        if best is not None:
            given = {} if best.checkpointing is None else {"activation_checkpointing": best.checkpointing}
            trainer = _trainer(inputs, best.name, given)
            if not inputs.trainer.get("plugins"):
                trainer["precision"] = inputs.strategy.precision_plugin.precision
            parts.append(yaml.safe_dump({"trainer": trainer}, sort_keys=False).rstrip())
    if options.search:
        parts += _search(inputs, options)
    if options.picture is not None:
        report.draw([row for row in rows if not row.refused], memory, options.picture)
        parts.append(f"picture: {options.picture}")
    notes = [f"note: {note}" for note in dict.fromkeys(inputs.notes)]
    text = "\n\n".join([*notes, *parts])
    return Plan(configured=configured, memory=memory, others=tuple(rows[1:]), best=best, text=text)


def _device(options: argparse.Namespace, inputs: Inputs, measured: Mapping[str, Any]) -> Device | None:
    """Return the device that doctor ``measured`` or the options name, None if there is neither."""
    if measured:
        # One processor: without a device's name the losses of products to tiles are not known.
        known = find_peaks(options.device_name or "")
        own = {"processors": 1} if known is None else {"attention": known.attention, "processors": known.processors}
        return Device(**measured, **own)
    if options.device_name is None and options.device_peak is None:
        return None
    dtype = inputs.strategy.policy.products
    peaks = find_peaks(options.device_name or "H100")
    peak = options.device_peak or peak_flops(options.device_name, dtype)
    if peaks is None or peak is None:
        raise ConfigurationError(
            f"the peak of {options.device_name!r} is not known here. Give it: --device-peak 989TFLOPS."
        )
    if options.device_name is None:
        # A device with an H100's relations to its peak.
        peaks = Peaks(half=peak / 1e12, single=peak / 1e12)
    return device_of(peaks, peak)


def links_of(options: argparse.Namespace, nodes: Nodes, measured: Links | None) -> Links:
    """Return the links' speeds from doctor's file, else from the options. The file must have every link of the run."""
    if measured is None:
        return Links(intra_node=options.intra_node, inter_node=options.inter_node)
    for speed, crossed, where in (
        (measured.intra_node, nodes.devices > 1, "inside a node"),
        (measured.inter_node, nodes.nodes > 1, "between nodes"),
    ):
        if crossed and speed is None:
            raise ConfigurationError(
                f"--links {options.links} has no link {where}, and the run is on {nodes.nodes} x {nodes.devices} "
                "devices. Run doctor on as many nodes and ranks, or give --intra-node and --inter-node."
            )
    return measured


def _read_step(options: argparse.Namespace, inputs: Inputs, measured: Links | None) -> None:
    """Read the device, a batch and the optimizer's state, and note parts that can't be read."""
    links = links_of(options, inputs.nodes, measured)
    device = _device(options, inputs, measured.device if measured is not None else {})
    # doctor measures collectives, so they reach its speeds in full.
    reached = 1.0 if measured is not None else LINK_REACHED
    inside, between = (speed and speed * reached for speed in (links.intra_node, links.inter_node))
    if device is not None:
        inputs.rates = Rates(device=device, nodes=inputs.nodes, inside=inside, between=between)
    if options.no_trace:
        inputs.without_activations("--no-trace was given")
    else:
        try:
            inputs.training_step = plan_inputs.loss_of(inputs)
            batch = plan_inputs.first_batch(inputs)
            inputs.batch = batch if options.batch_size is None else resized(batch, options.batch_size)
        except ConfigurationError as error:
            inputs.without_activations(error)
    try:
        optimizers, _ = plan_inputs.configured_optimizers(inputs)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        inputs.groups = [dict(group, params=list(group["params"])) for group in groups]
        inputs.optimizer = plan_inputs.optimizer_facts(inputs)
        inputs.optimizer_type = {"type": type(optimizers[0]).__name__}
    except ShardError as error:
        inputs.notes.append(f"the optimizer's state is taken as Adam's, two slots: {error}")


def _candidate(inputs: Inputs, name: str, strategy: ShardStrategy, **init_args: Any) -> Candidate:
    run = strategy.planned_run(
        ranks=inputs.nodes.ranks,
        per_node=inputs.nodes.devices,
        accumulate_grad_batches=inputs.micro_batches,
        optimizer=inputs.optimizer_type,
    )
    engine = strategy.engine_for(inputs.module)
    return Candidate(name=name, engine=engine, run=run, compiled=strategy.compile, init_args=init_args)


def _candidates(inputs: Inputs, *, meshes: bool = False) -> Iterator[Candidate | Row]:
    """Yield all names of the configured contract with every form of activation checkpointing, or a refused row.

    ``meshes``: hybrid names with all meshes of whole nodes.
    """
    for name, preset in registry.PRESETS.items():
        if preset.init_args.get("aligned", False) != inputs.strategy.aligned:
            continue
        for own in _meshes(inputs.nodes) if meshes and "mesh" in preset.init_args else [{}]:
            try:
                strategy = registry.build(name, **own)
                strategy.precision_plugin = inputs.strategy.precision_plugin
                candidate = _candidate(inputs, name, strategy, **own)
                inputs.engine(candidate)
            except ConfigurationError as error:
                yield Row(name=name, refused=str(error))
                continue
            for form in FORMS if candidate.engine.units(inputs.module) else (None,):
                given = {**own, **({} if form is None else {"activation_checkpointing": form})}
                yield replace(candidate, checkpointing=form, init_args=given)


def _meshes(nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Yield meshes whose copies of the model span 1, 2, 4, ... nodes, resharded after forward or not."""
    shard = nodes.devices
    while shard < nodes.ranks and nodes.ranks % shard == 0:
        mesh = {"replicate": nodes.ranks // shard, "shard": shard}
        yield from ({"mesh": mesh}, {"mesh": mesh, "reshard_after_forward": False})
        shard *= 2


def _search(inputs: Inputs, options: argparse.Namespace) -> list[str]:
    """Return the table of the fastest forms, and the first one's YAML or the path to which it was written."""
    if inputs.batch is None:
        raise ConfigurationError("--search needs the step's activations, which this plan does not have.")
    ranks, batch = inputs.nodes.ranks, batch_size_of(inputs.batch)
    total = options.global_batch or batch * inputs.micro_batches * ranks
    if total % ranks:
        raise ConfigurationError(f"a global batch of {total} does not divide over {ranks} devices.")
    found: list[Form] = []
    for each in _candidates(inputs, meshes=True):
        if isinstance(each, Candidate):
            compiles = bool(each.engine.units(inputs.module)) and registry.find(each.name).init_args.get("stage") != 3
            found += forms(inputs, each, total // ranks, compiles=compiles)
    found = [form for form in found if form.sure] or found
    best = ranked(found)
    if not best:
        return [f"search: nothing fits that has a global batch of {total}"]
    fit = "fit" if best[0].sure else "may fit"
    shown = f"the fastest of {len(found)} forms that keep a global batch of {total} and {fit}, the best of each name:"
    head = ["strategy", "with", "batch", "accumulated", "step", "bound by", "device"]
    table, text = columns([head, *(form.cells for form in best[:SHOWN])], numbers=True), _form_yaml(best[0], inputs)
    if options.output is not None:
        write_output(options.output, text + "\n", options.force)
        text = f"train the first with: lightning-shard fit --config {options.output}"
    return [f"{shown}\n{table}", text]


def _title(inputs: Inputs, row: Row) -> str:
    nodes, precision = inputs.nodes, inputs.strategy.precision_plugin.precision
    numel = sum(parameter.numel() for parameter in inputs.module.parameters())
    batch = "" if inputs.batch is None else f", batch {batch_size_of(inputs.batch)} per device"
    batch += f" x {inputs.micro_batches} accumulated" * (inputs.micro_batches > 1)
    return (
        f"{row.title}, {precision}, {nodes.nodes} x {nodes.devices} devices{batch}: {numel:,} parameters, "
        f"{show_bytes(inputs.memory)} per device to use"
    )


def _trainer(inputs: Inputs, name: str, init_args: Mapping[str, Any]) -> dict[str, Any]:
    preset, nodes = registry.find(name), inputs.nodes
    strategy = {"class_path": preset.class_path, "init_args": {**preset.init_args, **init_args}}
    return {"strategy": strategy, "num_nodes": nodes.nodes, "devices": nodes.devices}


def _form_yaml(form: Form, inputs: Inputs) -> str:
    """Return the configuration with the form's strategy, batch and accumulation.

    A comment says the batch size if the configuration has no argument for it.
    """
    content = inputs.config()
    trainer = _trainer(inputs, form.name, form.init_args)
    content["trainer"] |= {**trainer, "accumulate_grad_batches": form.micro_batches}
    given = [(content.get(key) or {}).get("init_args", {}) for key in ("data", "model")]
    holders = [arguments for arguments in given if "batch_size" in arguments]
    for holder in holders[:1]:
        holder["batch_size"] = form.batch
    text = yaml.safe_dump(content, sort_keys=False).rstrip()
    return text if holders else f"# The DataLoader's batch_size has to be {form.batch}.\n{text}"

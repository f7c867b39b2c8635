"""``lightning-shard plan --search``: the forms that are compared, and the YAML of the fastest."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from lightning_shard import registry
from lightning_shard.commands.plan_inputs import Inputs
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.planning.memory_trace import batch_size_of
from lightning_shard.planning.planner import Candidate, Planner
from lightning_shard.planning.report import FORMS
from lightning_shard.planning.search import Form, forms, ranked, table
from lightning_shard.planning.traffic import Nodes

Named = Callable[..., Candidate]
SHOWN = 8
"""The best forms that are printed."""


def parts(planner: Planner, inputs: Inputs, named: Named, options: argparse.Namespace) -> list[str]:
    """The table and the YAML, or where that was written."""
    if planner.batch is None:
        raise ConfigurationError("--search needs the step's activations, which this plan does not have.")
    ranks, batch = inputs.nodes.ranks, batch_size_of(planner.batch)
    total = options.global_batch or batch * inputs.micro_batches * ranks
    if total % ranks:
        raise ConfigurationError(f"a global batch of {total} does not divide over {ranks} devices.")
    found = [
        form
        for candidate, given, compiles in _candidates(inputs, planner, named)
        for form in forms(planner, candidate, given, total // ranks, compiles=compiles)
    ]
    best = ranked(found)
    if not best:
        return [f"search: nothing fits that has a global batch of {total}"]
    shown = f"the fastest of {len(found)} forms that keep a global batch of {total} and fit, and the best of each name:"
    text = _yaml(best[0], inputs)
    if options.output is None:
        return [f"{shown}\n{table(best[:SHOWN])}", text]
    try:
        options.output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {options.output} can't be written: {error.strerror}.") from error
    return [f"{shown}\n{table(best[:SHOWN])}", f"train the first with: lightning-shard fit --config {options.output}"]


def _candidates(inputs: Inputs, planner: Planner, named: Named) -> Iterator[tuple[Candidate, dict[str, Any], bool]]:
    """Each name of the configured contract, with meshes, forms of checkpointing, and whether its units compile."""
    for name, preset in registry.PRESETS.items():
        if preset.init_args.get("aligned", False) != inputs.strategy.aligned:
            continue
        hybrid = "mesh" in preset.init_args
        for mesh in _meshes(inputs.nodes) if hybrid else [{}]:
            given = {**mesh, "mesh": MeshConfig(**mesh["mesh"])} if mesh else {}
            try:
                candidate = named(inputs, name, **given)
                planner.engine(candidate)
                units = candidate.engine.units(planner.module)
            except ConfigurationError:
                continue
            for form in FORMS if units else (None,):
                more = {} if form is None else {"activation_checkpointing": form}
                run = Candidate(name=name, engine=candidate.engine, run=candidate.run, checkpointing=form)
                compiles = bool(units) and preset.init_args.get("stage") != 3
                yield run, {**mesh, **more}, compiles


def _meshes(nodes: Nodes) -> Iterator[dict[str, Any]]:
    """Copies of the model in one node, in two, in four, ...; resharded after forward or not."""
    shard = nodes.devices
    while shard < nodes.ranks and nodes.ranks % shard == 0:
        mesh = {"replicate": nodes.ranks // shard, "shard": shard}
        yield from ({"mesh": mesh}, {"mesh": mesh, "reshard_after_forward": False})
        shard *= 2


def _yaml(form: Form, inputs: Inputs) -> str:
    """The configuration with another strategy, batch and accumulation; what it can't set it says in a comment."""
    content, preset = inputs.config(), registry.find(form.name)
    strategy = {"class_path": preset.class_path, "init_args": {**preset.init_args, **form.init_args}}
    trainer = {"strategy": strategy, "num_nodes": inputs.nodes.nodes, "devices": inputs.nodes.devices}
    content["trainer"] |= {**trainer, "accumulate_grad_batches": form.micro_batches}
    given = [(content.get(key) or {}).get("init_args", {}) for key in ("data", "model")]
    holders = [arguments for arguments in given if "batch_size" in arguments]
    for holder in holders[:1]:
        holder["batch_size"] = form.batch
    text = yaml.safe_dump(content, sort_keys=False).rstrip()
    return text if holders else f"# The DataLoader's batch_size has to be {form.batch}.\n{text}"

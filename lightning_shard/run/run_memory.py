"""Memory of a run: tensors resident on this rank, predicted bytes, and advice."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard._lightning import processes
from lightning_shard.engines.engine import Engine, PlannedRun
from lightning_shard.engines.memory_breakdown import Resident, is_sharded
from lightning_shard.memory import MemoryAccount, most
from lightning_shard.meters.memory_account import StepMeter, account, advice, append_to_message, is_out_of_memory
from lightning_shard.planning.memory_trace import Step, batch_size_of, trace_step
from lightning_shard.planning.model_facts import ModelFacts, OptimizerFacts, Training, facts_of, optimizer_facts
from lightning_shard.planning.planner import Run, largest_batch
from lightning_shard.planning.predict import step_points
from lightning_shard.planning.step_memory import with_averages
from lightning_shard.run.averaging import Averaging
from lightning_shard.tensors.fake import fake_mode, make_fake


class RunMemory:
    def __init__(
        self, module: nn.Module, engine: Engine, run: PlannedRun, *, device: torch.device, recomputes: bool
    ) -> None:
        self._module, self._engine, self._run = module, engine, run
        self._device, self._recomputes = device, recomputes
        self._facts: ModelFacts | None = None
        self.averaging: Averaging | None = None
        self.advised = False

    def resident(self) -> Iterable[Resident]:
        """Live tensors of the run on this rank except activations, by kind and memory. No communication."""
        found = list(self._engine.memory_breakdown())
        if self.averaging is not None:
            memory = next((r.memory for kind in ("masters", "parameters") for r in found if r.kind == kind), "device")
            found += self.averaging.resident("host" if memory == "nvme" else memory)
        return found

    def account(self) -> MemoryAccount:
        """Resident bytes on this rank now, without activations. No communication."""
        return account(self.resident())

    def step_meter(self) -> StepMeter:
        return StepMeter(self._module, self.resident, self._engine.unsharded, device=self._device)

    def note_module(self) -> None:
        self._facts = None if any(map(is_sharded, self._module.parameters())) else facts_of(self._module, self._engine)

    def predicted(self, optimizers: Sequence[Optimizer]) -> MemoryAccount | None:
        """Predicted bytes of the fullest rank in a step, without activations, after set-up. None: `note_module` was not
        called, or the module was sharded before the run. Unknown optimizer state counts 0.
        """
        if self._facts is None:
            return None
        engine = self._engine.memory_model(self._module, self._run)
        points = step_points(self._training(self._facts, optimizers), engine, None)
        return with_averages(most(*(point.account for point in points)), getattr(self.averaging, "place", None))

    def _training(self, model: ModelFacts, optimizers: Sequence[Optimizer]) -> Training:
        facts = [optimizer_facts(optimizer) for optimizer in optimizers]
        known = facts[0] if len(set(map(repr, facts))) == 1 else None
        optimizer, count = known or OptimizerFacts(slots=(), fixed_bytes=0), self._run.accumulate_grad_batches
        return Training(model=model, policy=self._run.policy, optimizer=optimizer, micro_batches=count)

    def largest_batch(self, module: Any, step: Step, optimizers: Sequence[Optimizer], limit: int) -> int | None:
        """Largest batch that is predicted to fit into ``limit`` bytes, or None. ``module``: a `meta_copy`."""
        mode = fake_mode()
        make_fake(module, mode)
        processes.set_device(module, torch.device("cpu"))  # as the fake tensors
        step = replace(step, units=self._engine.units(module))
        size, policy = batch_size_of(step.batch), self._run.policy
        traces = [trace_step(module, step, policy, mode, batch_size=each) for each in (size, 2 * size)]
        training = self._training(facts_of(module, self._engine), optimizers)
        engine = self._engine.memory_model(self._module, self._run)
        averages, cpu = getattr(self.averaging, "place", None), self._device.type == "cpu"
        run = Run(training=training, engine=engine, traces=tuple(traces), averages=averages, cpu=cpu)
        found = largest_batch(run, limit)
        return found and found[0]

    def advice(self, account: MemoryAccount) -> str:
        """Settings that would need less of a device than ``account``, as lines of text. No communication."""
        self.advised = True
        facts = self._engine.memory_model(self._module, self._run)
        return advice(account, facts, aligned=self._run.aligned, checkpointing=self._recomputes)


def explain_out_of_memory(exception: BaseException, memory: RunMemory | None) -> None:
    """Add advice to an out-of-memory error, unless a `MemoryCallback` has. No communication."""
    if memory is None or memory.advised or not is_out_of_memory(exception):
        return
    try:
        text = memory.advice(memory.account())
    except Exception as error:  # The out-of-memory error is raised, not a failure of its account.
        text = f"(no account of the memory: {type(error).__name__}: {error})"
    more = "MemoryCallback shows the memory by kind, `lightning-shard plan --compare` shows engines that fit."
    append_to_message(exception, f"{text}\n{more}")

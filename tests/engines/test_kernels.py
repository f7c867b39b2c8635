"""Which kernels a run needs, and what is missing to build them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.engines.zero import kernels
from lightning_shard.engines.zero.kernels import required_kernels


def zero(**sections: Any) -> dict[str, Any]:
    return {"zero_optimization": sections}


NVME, CPU = {"device": "nvme"}, {"device": "cpu"}


class DeepSpeedCPUAdam(torch.optim.SGD):
    """Only the name counts; DeepSpeed's own would be compiled."""


class Derived(DeepSpeedCPUAdam):
    pass


@pytest.mark.parametrize(
    ("config", "optimizer", "expected"),
    [
        (zero(), None, ()),
        (zero(offload_optimizer=NVME), torch.optim.AdamW, ("async_io", "pin_memory")),
        ({**zero(offload_param=NVME), "aio": {"use_gds": True}}, None, ("async_io", "gds", "pin_memory")),
        (zero(zero_quantized_weights=True), None, ("quantizer",)),
        (zero(), Derived, ("cpu_adam",)),
        (zero(offload_optimizer=NVME), DeepSpeedCPUAdam, ("async_io", "cpu_adam", "pin_memory")),
    ],
)
def test_which_kernels_are_needed(config: dict[str, Any], optimizer: Any, expected: tuple[str, ...]) -> None:
    made = None if optimizer is None else optimizer([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    assert required_kernels(config, made) == expected


@pytest.mark.parametrize(
    ("section", "on_device", "offloaded"),
    [
        ({"type": "Adam"}, ("fused_adam",), ("cpu_adam",)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, (), ()),
        ({"type": "Lion"}, ("fused_lion",), ("cpu_lion",)),
        ({"type": "Lamb"}, ("fused_lamb",), ("fused_lamb",)),
    ],
)
def test_kernels_of_the_optimizer_section(
    section: dict[str, Any], on_device: tuple[str, ...], offloaded: tuple[str, ...]
) -> None:
    assert required_kernels({**zero(), "optimizer": section}, None) == on_device
    assert required_kernels({**zero(offload_optimizer=CPU), "optimizer": section}, None) == offloaded
    # An optimizer from configure_optimizers takes the section's place.
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    assert required_kernels({**zero(), "optimizer": section}, sgd) == ()


def test_the_kernels_are_those_that_deepspeed_builds() -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    names = {builder.name: type(builder).__name__ for builder in ALL_OPS.values()}
    own = {name: builder for name, builder in kernels.BUILDERS.items() if name in names}
    assert own == {name: names[name] for name in own}
    assert {"async_io", "cpu_adam"} <= own.keys()


# What is missing


def path_with(folder: Path, *commands: str) -> str:
    """A PATH on which there are these commands and nothing else."""
    folder.mkdir()
    for command in commands:
        (folder / command).symlink_to("/bin/true")
    return str(folder)


def test_each_missing_tool_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", {})
    monkeypatch.setenv("PATH", path_with(tmp_path / "none"))
    problems = kernels.missing_build_tools(("cpu_adam",), "cpu")
    assert problems == [
        f"DeepSpeed compiles cpu_adam, but this machine lacks {tool}"
        for tool in ("a C++ compiler (apt-get install g++)", "ninja on PATH (pip install ninja)")
    ]
    monkeypatch.setenv("PATH", path_with(tmp_path / "ninja", "ninja", "c++"))
    assert kernels.missing_build_tools(("cpu_adam",), "cpu") == []
    monkeypatch.setattr(OpBuilder, "has_function", lambda *args: False)
    [problem] = kernels.missing_build_tools(("async_io", "pin_memory"), "cpu")
    assert problem.endswith("for async_io libaio-dev)")
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", {"async_io": 1, "pin_memory": 1})
    assert kernels.missing_build_tools(("async_io", "pin_memory"), "cpu") == []


def test_a_kernel_that_the_device_does_not_have_is_refused() -> None:
    [problem] = kernels.missing_build_tools(("fused_lamb",), "cpu")
    assert problem == "DeepSpeed has no kernel fused_lamb for cpu: use another option or optimizer"

"""A stand-in for a GPU: an out-of-tree device of torch, ``standin``, on which all engines train without one.

Memory begins as NaN and becomes NaN when it is freed, and late copies happen late: what forgets to wait reads NaN.
The default process group has no CPU backend but where ``TESTS_GROUPS=cpu`` asks for it, and is split as NCCL's is.

``TESTS_DEVICE=stand_in pytest tests/strategies`` runs tests on it: what asks for the CPU gets it. `NOT_ON_A_DEVICE` has
the tests for which that makes no sense.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.utils.cpp_extension import get_default_build_root, load

from lightning_shard.engines.zero import connection
from lightning_shard.strategies.strategy import ShardStrategy

NAME = "standin"

NOT_ON_A_DEVICE = {
    "test_autocast.py": "stock DDP makes a stream of torch.cuda",
    "test_gpu.py": "for real ones",
    "test_moments.py": "their steps make tensors on the CPU",
    "test_sync_batchnorm_is_refused_on_cpu": "it is not refused here",
    "test_engines_take_the_steps_of_a_plain_loop": "the plain loop's attention is the CPU's",
    "test_parameters_have_one_layout_in_memory": "its step makes tensors on the CPU",
    "test_they_are_refused_on_all_ranks": "its hook puts a module on the CPU there",
    "test_settings_that_cannot_work": "it names the CPU in a message",
    "test_live.py::test_fsdp": "Adam's step counts lie on the host beside a device; gradients there have no padding",
    "test_kernels.py": "DeepSpeed compiles more for a device, and a process can load an operator from one folder only",
    "test_steps_that_do_something_of_their_own": "its steps make tensors on the CPU",
    "fit_is_one_with_it[shard_deepspeed_stage_1_aligned]": "a device's allocator rounds up to more than its limit",
    "is_refused[no limit-": "a device has memory of its own",
    "test_a_logger_has_the_meters_of_all_ranks": "resident memory is a CPU's",
    "test_what_is_not_known_is_left_out": "it names the CPU in a message",
    "test_validate_test_and_predict_with_and_without_fit": "stock DDP takes the group for one without gloo",
    "test_all_groups_of_a_run_wait_as_long_as_the_default_one": "its collectives have no timeout of their own",
    "test_a_slow_rank_is_named": "what a rank waits for in a collective is a device's to wait for",
}
"""Part of a test's id, and the reason."""


def chosen() -> bool:
    """Whether tests run on it."""
    return os.environ.get("TESTS_DEVICE") == "stand_in"


def backend() -> str:
    """That of a test's process group: the device's alone, as NCCL is, or with gloo for the CPU where a test asks so."""
    return f"cpu:gloo,{NAME}:{NAME}" if os.environ.get("TESTS_GROUPS") == "cpu" else NAME


@functools.cache
def extension() -> Any:
    """The compiled device; about 20 seconds the first time."""
    folder = Path(get_default_build_root(), "lightning_shard_stand_in")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "ours", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, which a build that was killed leaves for ever
        source = str(Path(__file__).with_name("device.cpp"))
        return load("lightning_shard_stand_in", [source], extra_cflags=["-O1"], build_directory=str(folder))


def _index(device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(extension().current_device() if index is None else index)


def _device(device: Any = None) -> torch.device:
    return torch.device(NAME, _index(device))


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        return super().__new__(cls, **known) if known else super().__new__(cls, _device(device), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, _device(), enable_timing=enable_timing)


class Current:
    """Makes a device the current one."""

    def __init__(self, device: Any) -> None:
        self._device = _index(device)

    def __enter__(self) -> None:
        self._before = extension().current_device()
        extension().set_device(self._device)

    def __exit__(self, *error: object) -> None:
        extension().set_device(self._before)


def _every() -> range:
    return range(extension().device_count())


def _module() -> types.ModuleType:
    """What ``torch.cuda`` is for GPUs."""
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        # Devices
        device_count=extension().device_count,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        current_device=extension().current_device,
        set_device=lambda device: extension().set_device(_index(device)),
        synchronize=lambda device=None: torch.accelerator.synchronize(_index(device)),
        device=Current,
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name=NAME, total_memory=extension().total, major=9, minor=0, multi_processor_count=1
        ),
        get_device_name=lambda device=None: NAME,
        get_device_capability=lambda device=None: (9, 0),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        utilization=lambda device=None: 0,
        # Streams
        Stream=Stream,
        Event=Event,
        stream=lambda stream: stream or contextlib.nullcontext(),
        current_stream=lambda device=None: torch.accelerator.current_stream(_index(device)),
        default_stream=lambda device=None: torch.Stream(
            stream_id=0,
            device_index=_index(device),
            device_type=torch.accelerator.current_stream().device_type,
        ),
        set_stream=torch.accelerator.set_stream,
        # Memory
        memory_stats=lambda device=None: torch.accelerator.memory_stats(_index(device)),
        memory_allocated=lambda device=None: torch.accelerator.memory_allocated(_index(device)),
        max_memory_allocated=lambda device=None: torch.accelerator.max_memory_allocated(_index(device)),
        memory_reserved=lambda device=None: torch.accelerator.memory_reserved(_index(device)),
        max_memory_reserved=lambda device=None: torch.accelerator.max_memory_reserved(_index(device)),
        reset_peak_memory_stats=lambda device=None: torch.accelerator.reset_peak_memory_stats(_index(device)),
        mem_get_info=lambda device=None: torch.accelerator.get_memory_info(_index(device)),
        empty_cache=lambda: None,
        # Random numbers
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: extension().seed_generator(_index(), seed),
        manual_seed_all=lambda seed: [extension().seed_generator(device, seed) for device in _every()],
        get_rng_state=lambda device=None: extension().generator_state(_index(device)),
        set_rng_state=lambda state, device=None: extension().set_generator_state(_index(device), state),
        get_rng_state_all=lambda: list(map(extension().generator_state, _every())),
        set_rng_state_all=lambda states: [*map(extension().set_generator_state, _every(), states)],
    )
    return module


class StandIn(Accelerator):
    """For ``Trainer(accelerator=StandIn())``."""

    def setup_device(self, device: torch.device) -> None:
        extension().set_device(device.index)

    def teardown(self) -> None:
        """Nothing."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        if isinstance(devices, int):
            return list(range(devices))
        return [int(device) for device in (devices.split(",") if isinstance(devices, str) else devices)]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, device) for device in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(extension().device_count())

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    @staticmethod
    def get_device_type() -> str:
        return NAME


def _accelerate_deepspeed() -> None:
    """Give DeepSpeed its own accelerator for CUDA, with this device's name and the CPU's kernels."""
    from deepspeed.accelerator import cuda_accelerator

    source = Path(cuda_accelerator.__file__).read_text()
    for old, new in (
        ("import torch.cuda", "import torch"),
        ("torch.cuda", f"torch.{NAME}"),
        ("'cuda'", f"'{NAME}'"),
        ("'cuda:", f"'{NAME}:"),
    ):
        source = source.replace(old, new)
    names = {"__name__": "deepspeed.accelerator.standin", "__package__": "deepspeed.accelerator"}
    exec(compile(source, "<DeepSpeed's CUDA accelerator>", "exec"), names)
    cpu = connection._cpu_accelerator()

    class Ours(names["CUDA_Accelerator"]):  # type: ignore[misc,name-defined]
        create_op_builder, get_op_builder, op_builder_dir = (
            cpu.create_op_builder,
            cpu.get_op_builder,
            cpu.op_builder_dir,
        )

        def __init__(self) -> None:
            self._name = self._communication_backend_name = NAME
            self._compile_backend, self._nvtx_domains = "inductor", {}

        def available_memory(self, device_index: Any = None) -> int:
            return int(extension().total)

        def lazy_call(self, callback: Any) -> None:
            callback()

    cuda_accelerator.CUDA_Accelerator = Ours


@functools.cache
def install() -> None:
    """Register the device, its process group and its accelerators in this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    extension()
    module = _module()
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.serialization.register_package(
        15,
        lambda storage: str(storage.device) if storage.device.type == NAME else None,
        lambda storage, tag: storage.to(NAME) if tag.startswith(NAME) else None,
    )
    # As for CUDA, which gloo takes too.
    dist.Backend.backend_capability["gloo"].append(NAME)
    dist.Backend.register_backend(
        NAME,
        lambda store, rank, size, timeout: extension().backend(
            rank, size, dist.ProcessGroupGloo(store, rank, size, timeout)
        ),
        devices=[NAME],
    )
    _accelerate_deepspeed()
    _replace_cpu()


def _replace_cpu() -> None:
    init = _AcceleratorConnector.__init__

    @functools.wraps(init)
    def replaced(self: Any, *args: Any, accelerator: Any = "auto", strategy: Any = "auto", **kwargs: Any) -> None:
        ours = isinstance(strategy, ShardStrategy) or str(strategy).startswith("shard_")
        accelerator = StandIn() if accelerator == "cpu" and ours else accelerator
        init(self, *args, accelerator=accelerator, strategy=strategy, **kwargs)

    _AcceleratorConnector.__init__ = replaced  # type: ignore[method-assign]

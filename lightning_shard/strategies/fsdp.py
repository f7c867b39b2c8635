"""Lightning's adapter of FSDP2."""

from collections.abc import Callable
from typing import Any, Literal, Unpack

from torch import nn
from typing_extensions import override

from lightning_shard.arguments import Given, converted
from lightning_shard.engines.engine import Engine
from lightning_shard.engines.fully_shard import FSDPOptions, FullyShard
from lightning_shard.engines.sharding import FORWARD_METHODS
from lightning_shard.engines.transforms import ForwardOptions
from lightning_shard.engines.units import ClassNames, UnitRule, class_names, unit_rules
from lightning_shard.errors import ConfigurationError
from lightning_shard.mesh import MeshConfig
from lightning_shard.strategies.settings import CommonArguments, CommonSettings, with_common_arguments
from lightning_shard.strategies.strategy import ShardStrategy


class ShardFSDPStrategy(ShardStrategy):
    """Fully sharded data parallelism on torch's FSDP2 (``fully_shard``): full, hybrid, grad-op and with offload."""

    @with_common_arguments
    def __init__(
        self,
        *,
        mesh: Given[MeshConfig] | None = None,
        units: Literal["auto"] | int | list[str | type[nn.Module] | Given[UnitRule]] = "auto",
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        ignored_modules: ClassNames | None = None,
        forward_methods: list[str] | None = None,
        find_unused_parameters: bool = False,
        separate_reduce_scatter: bool = False,
        symmetric_memory: bool = False,
        custom_all_gather: Callable[..., Any] | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **common: Unpack[CommonArguments],
    ) -> None:
        """Set up FSDP2.

        Args:
            mesh: sizes of the axes ``replicate`` and ``shard``. Default: sharded over all processes. For hybrid
                sharding give ``replicate: auto`` and ``shard: auto``: shards inside a node, replicas across nodes.
            units: modules whose parameters are gathered together. "auto": a Hugging Face model's own
                ``_no_split_modules``, else the repeated blocks of module lists, and each embedding and linear layer
                outside of them that is as large as one, unless its weight is tied. A list of classes or their names.
                Or a number of parameters, for the smallest modules that have as many. An entry of the list may also be
                a mapping with its own settings: ``modules`` (any of these) or ``pattern`` (a regular expression for
                whole names of modules), ``reshard_after_forward`` and ``compute`` ("fp32", "bf16"). Parameters of no
                unit are gathered with the LightningModule.
            reshard_after_forward: true: free a unit after its forward and gather it again in backward (ZeRO-3).
                false: keep it (ZeRO-2). A number: keep a part of this many ranks (hpZ), a divisor of the shard axis'
                size other than 1 and itself.
            cpu_offload: keep parameters, gradients and optimizer state on the host and step there.
            forward_prefetch: units to gather ahead in forward. 0 leaves it to torch, which overlaps the next one.
            backward_prefetch: the same in backward.
            ignored_modules: classes, or their names, of modules that stay full on every rank. Their gradients are
                averaged before the step.
            forward_methods: names of methods that run a model besides ``forward``. Default: encode, generate.
            find_unused_parameters: let ranks exchange in every step which parameters they used, for branches that are
                rare. Default: only in the first three steps and after a rank's set has changed. A parameter that no
                rank used is not stepped, as under DDP.
            separate_reduce_scatter: reduce gradients over a communicator of their own, so that in backward they overlap
                the gathers (torch's ``set_separate_reduce_scatter_group``).
            symmetric_memory: gather through NCCL's symmetric memory (torch's ``set_symm_mem_for_comm``). CUDA only.
            custom_all_gather: an object that gathers instead of torch: it can be called and has ``allocate``, as
                torch's ``set_custom_all_gather`` takes it. Its class is the same on every rank.
            start_method: how the other processes of this node are started: "popen" runs the script again. "fork" works
                in notebooks, "spawn" and "forkserver" if the script's objects can be pickled. But for "popen" each
                process gathers the full weights at the end of a fit, for the main process's module.

        Raises:
            ConfigurationError: a value that can't work, before anything is touched.
        """
        super().__init__(CommonSettings(mesh=converted(mesh) or MeshConfig(), **common))
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth < 0:
                raise ConfigurationError(f"{name} is {depth}, but must be 0 or the number of units to gather ahead.")
        if custom_all_gather is not None and (
            symmetric_memory or not callable(custom_all_gather) or not hasattr(custom_all_gather, "allocate")
        ):
            raise ConfigurationError(
                f"custom_all_gather is {custom_all_gather!r}, but must be an object that can be called and has "
                "`allocate`, as torch's set_custom_all_gather takes it, without symmetric_memory."
            )
        named: Any = units
        if not isinstance(units, str | int):
            named = [entry if isinstance(entry, UnitRule) else class_names([entry])[0] for entry in [*named]]
        unit_rules(named)  # raises
        self._options = FSDPOptions(
            mesh=self._settings.mesh,
            units=named,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            ignored_modules=tuple(class_names(ignored_modules or [])),
            find_unused_parameters=find_unused_parameters,
            cpu_offload=cpu_offload,
            forward_methods=tuple(forward_methods) if forward_methods is not None else FORWARD_METHODS,
            separate_reduce_scatter=separate_reduce_scatter,
            symmetric_memory=symmetric_memory,
            custom_all_gather=custom_all_gather,
        )
        self._start_method = start_method

    @override
    def engine_for(self, module: nn.Module | None = None, *, plain: bool = False) -> Engine:
        options, forward = self._options, self._settings.forward
        if plain:
            options = FSDPOptions(mesh=options.mesh, reshard_after_forward=options.reshard_after_forward)
            forward = ForwardOptions()
        return FullyShard(options, forward, at_boundary=self._settings.at_boundary)

"""The undocumented names of DeepSpeed that this folder uses, by their class or module."""

from lightning_shard.private_names import require


def require_internals() -> None:
    """ImportError: a name is gone, or can't be assigned any more although this package does so."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
    from deepspeed.runtime.swap_tensor.optimizer_utils import (
        OptimizerStateSwapInfo,
        OptimizerSwapper,
        SwapTensorContext,
    )
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
        AsyncPartitionedParameterSwapper,
        PartitionedParamStatus,
    )
    from deepspeed.runtime.swap_tensor.utils import SwapBufferManager
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup, IPGBucket
    from deepspeed.utils import groups

    engine = deepspeed.DeepSpeedEngine
    require(engine, "_backward_epilogue _backward_prologue allreduce_gradients backward basic_optimizer destroy device")
    require(engine, "is_gradient_accumulation_boundary optimizer set_gradient_accumulation_boundary step")
    require(engine, "communication_data_type torch_autocast_enabled zero_quantized_weights")
    require(engine, assigned="_backward_prologue_per_tensor _broadcast_model _running_engine_backward lr_scheduler")

    require(BF16_Optimizer, "bf16_groups fp32_groups_flat_partition fp32_groups_gradient_flat_partition optimizer")
    require(BF16_Optimizer, "fp32_groups_gradients fp32_groups_gradients_flat real_dp_process_group update_lp_params")
    require(BF16_Optimizer, "clear_backward_seen_flag", assigned="get_grads_for_norm")

    stages_1_2 = DeepSpeedZeroOptimizer
    require(stages_1_2, "_use_compact_grad_partition_buffer all_grad_tensors")
    require(stages_1_2, "accumulated_grads_in_cpu averaged_gradients bit16_groups clear_backward_seen_flag cpu_offload")
    require(stages_1_2, "device dp_process_group finalize_gradient_accumulation_boundary get_param_id grad_accum")
    require(stages_1_2, "loss_scaler optimizer params_in_partition partition_gradients real_dp_process_group")
    require(stages_1_2, "get_gradient_for_reduction ipg_buckets overlap_comm params_already_reduced")
    require(stages_1_2, "overlapping_partition_gradients_reduce_epilogue reduce_ready_partitions_and_remove_grads")
    require(stages_1_2, "reduce_scatter round_robin_bit16_groups round_robin_bit16_offsets update_lp_params")
    require(stages_1_2, "single_partition_of_fp32_groups use_grad_accum_attribute")
    require(stages_1_2, assigned="allreduce_bucket average_tensor check_grad_overflow check_overflow gradient_average")
    require(stages_1_2, assigned="independent_gradient_partition_epilogue overflow reduce_gradients scaled_global_norm")
    require(stages_1_2, assigned="update_offload_overflow_tracker")
    require(GradPartitionBufferGroup, "flat_partition")
    require(IPGBucket, "params")

    stage_3 = DeepSpeedZeroOptimizer_Stage3
    require(stage_3, "_reassign_or_swap_out_partitioned_parameters averaged_gradients clear_backward_seen_flag")
    require(stage_3, "finalize_gradient_accumulation_boundary fp16_groups fp16_partitioned_groups_flat_numel")
    require(stage_3, "fp32_partitioned_groups_flat get_param_id grad_partitions_flat_buffer grad_position ipg_buckets")
    require(stage_3, "loss_scaler offload_optimizer offload_param optimizer optimizer_swapper parameter_offload")
    require(stage_3, "persistent_parameters sub_group_to_group_id")
    require(stage_3, assigned="_offload_grad_partition_at_boundary _prepare_sub_group check_overflow")
    require(stage_3, assigned="complete_grad_norm_calculation_for_cpu_offload get_grad_norm_direct")
    require(stage_3, assigned="independent_gradient_partition_epilogue overflow")
    require(LossScalerBase, assigned="update_scale")

    # Set on parameters and their shards.
    require(Init, "_convert_to_deepspeed_param all_gather ds_id ds_numel ds_persist ds_process_group")
    require(Init, "ds_secondary_tensor ds_shape ds_status ds_tensor param_swapper partition_numel")
    require(Init, assigned="partition")
    require(Init, assigned="final_location nvme_swapper status")
    require(ZeroParamStatus, "AVAILABLE")
    require(DeepSpeedZeRoOffload, "backward_hooks ds_inflight_param_registry forward_hooks partition_all_parameters")
    require(DeepSpeedZeRoOffload, "post_sub_module_backward_function pre_sub_module_backward_function")
    require(DeepSpeedZeRoOffload, "release_backward_leftovers")
    require(DeepSpeedZeRoOffload, assigned="pre_sub_module_forward_function")
    require(parameter_offload, "FWD_MODULE_STACK")
    require(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__params_to_release")

    require(OptimizerSwapper, "_get_param_swap_info dtype is_swappable_tensor numel_alignment")
    require(OptimizerSwapper, "purge_state swap_buffer_manager swap_element_size swap_folder")
    require(OptimizerStateSwapInfo, "num_tensors numel tensors")
    require(SwapTensorContext, "compute_tensor swap_path")
    require(SwapBufferManager, "aio_handle all_buffers dtype free_buffer_index num_elems", assigned="count")
    swapper = AsyncPartitionedParameterSwapper
    require(swapper, "aio_read_handle buffers dtype get_buffer get_path partitioned_swap_buffer swap_out_and_release")
    require(swapper, "swappable_tensor", assigned="swap_in")
    require(PartitionedParamStatus, "AVAILABLE")

    require(comm, assigned="cdb")
    require(TorchBackend, assigned="new_group")
    require(torch_autocast, "PARAM_COMM_DTYPE_ATTR_NAME", assigned="TORCH_AUTOCAST_INITIALIZED")
    require(groups, "_get_zero_param_intra_parallel_group _release_process_group_references")
    require(DeepSpeedCPUAdam, "adam_w_mode ds_opt_adam fp32_optimizer_states opt_id")
    require(OpBuilder, "_loaded_ops")

"""The public names of FairScale 0.4.13's wrapper, and which of them our door lacks.

A recorded fact of that release, the last; ``tests/clients`` compares it with the package itself.
"""

from __future__ import annotations

# of fairscale.nn.FullyShardedDataParallel, what its class says itself
METHODS = frozenset(
    {
        "append_shared_param",
        "apply",
        "assert_state",
        "clip_grad_norm_",
        "consolidate_shard_weights",
        "cpu_offload",
        "extra_repr",
        "forward",
        "gather_full_optim_state_dict",
        "get_shard_from_optim_state_dict",
        "load_local_state_dict",
        "load_state_dict",
        "local_metadata_dict",
        "local_state_dict",
        "module",
        "named_parameters",
        "no_sync",
        "non_shared_params",
        "parameters",
        "params_with_grad",
        "reset_parameters",
        "set_gradient_divide_factors",
        "state_dict",
        "summon_full_params",
    }
)

# of its constructor, in order, with defaults
ARGUMENTS = {
    "process_group": None,
    "process_group_reduce_scatter": "reduce_scatter",
    "reshard_after_forward": True,
    "disable_reshard_on_root": True,
    "mixed_precision": False,
    "fp32_reduce_scatter": False,
    "flatten_parameters": True,
    "move_params_to_cpu": False,
    "compute_dtype": None,
    "buffer_dtype": None,
    "move_grads_to_cpu": None,
    "bucket_cap_mb": 25,
    "compute_device": None,
    "no_broadcast_optim_state": False,
    "state_dict_device": None,
    "clear_autocast_cache": False,
    "force_input_to_fp32": False,
    "verbose": False,
    "cpu_offload": False,
    "state_dict_on_rank_0_only": False,
    "gradient_predivide_factor": None,
    "allow_reset_parameters": False,
}

# what its modules offer, by module
MODULES = {
    "fairscale.nn.data_parallel": (
        "FullyShardedDataParallel",
        "ShardedDataParallel",
        "TrainingState",
        "auto_wrap_bn",
        "get_fsdp_instances",
        "no_pre_load_state_dict_hook",
    ),
    "fairscale.nn.wrap": (
        "auto_wrap",
        "config_auto_wrap_policy",
        "default_auto_wrap_policy",
        "enable_wrap",
        "wrap",
    ),
    "fairscale.nn.checkpoint": ("checkpoint_wrapper", "is_checkpointing", "is_recomputing"),
    "fairscale.internal.reduce_scatter_bucketer": ("Bucket", "ReduceScatterBucketer"),
}

LACKING = frozenset(
    {
        "Bucket",  # memory of the bucketer, which is comm's affair
        "ShardedDataParallel",  # not fully sharded
        "TrainingState",  # and with it assert_state: a label of the engine's own
        "append_shared_param",  # "experimental"; tied parameters need no call
        "assert_state",
        "is_checkpointing",  # what a module may ask torch's checkpointing
        "is_recomputing",
        "no_pre_load_state_dict_hook",  # a hook that is not here
    }
)

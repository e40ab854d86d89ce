"""The arguments of Megatron that may be given.

Megatron's parser takes some 850. Many ask for parts that our layers, our data, our plan or our
checkpoints know nothing of: other norms, windows of attention, experts, other samplers, starting
anew. Some would be ignored and some would make another training than the plan says. So this list
names those that are followed, and all others are refused.
"""

# What the tensors of a checkpoint depend on. Megatron's names, and one of ours.
SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "qk_layernorm", "sandwich_norm"),
    *("untie_embeddings_and_output_weights", "vocab_size"),
)
# All that makes up the model, so that an export, an evaluation and an estimate have to know it.
MODEL = frozenset(
    (
        *SHAPE,
        *("make_vocab_size_divisible_by", "seq_length", "max_position_embeddings"),
        *("position_embedding_type", "rotary_base", "normalization", "norm_epsilon", "swiglu"),
        *("disable_bias_linear", "output_logit_cap", "attention_dropout", "hidden_dropout"),
        *("init_method_std", "tokenizer_type"),
    )
)
# The only values that the layers, the estimates and the checkpoints are made for.
FIXED = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "disable_bias_linear": True,
    "tokenizer_type": "NullTokenizer",
    "optimizer": "adam",
    "ckpt_format": "torch_dist",
    "eval_iters": 0,
}
# Those of them that Megatron takes by itself where nothing is given.
FIXED_BY_DEFAULT = ("optimizer", "ckpt_format")
# The launcher sets these itself.
DERIVED = (
    *("train_samples", "train_iters", "phase_transition_iterations", "phase_name", "data_path"),
    *("save", "load", "record_to", "override_opt_param_scheduler", "measure_to"),
    *("measure_seconds", "exit_on_missing_checkpoint"),
)
# What is computed, and on what, in which steps: a run that goes on has to keep it.
_PRECISION = (
    *("bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
    *("hysteresis", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
)
_SCHEDULE = (
    *("seed", "use_cpu_initialization", "pretrained_checkpoint", "global_batch_size"),
    *("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"),
    *("lr", "min_lr", "lr_warmup_samples", "lr_decay_style", "lr_decay_samples"),
    *("lr_wsd_decay_style", "lr_wsd_decay_samples", "start_weight_decay", "end_weight_decay"),
    *("weight_decay_incr_style", "reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
    *("eval_iters", "ckpt_format"),
)
# By which kernels, and what is kept for the backward: the same but for rounding.
_KERNELS = (
    *("transformer_impl", "no_persist_layer_norm", "no_rope_fusion", "no_masked_softmax_fusion"),
    *("no_bias_gelu_fusion", "no_bias_swiglu_fusion", "no_bias_dropout_fusion"),
    *("no_gradient_accumulation_fusion", "deterministic_mode", "disable_jit_fuser"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("recompute_activations", "distribute_saved_activations", "empty_unused_memory_level"),
    *("manual_gc", "manual_gc_interval", "no_manual_gc_eval"),
)
# How the work is divided.
_LAYOUT = (
    *("micro_batch_size", "num_workers", "data_cache_path"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("sequence_parallel", "num_layers_per_virtual_pipeline_stage"),
    *("num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_virtual_pipeline_stage"),
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "overlap_p2p_communication_warmup_flush"),
    *("no_overlap_p2p_communication", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    *("use_tp_pp_dp_mapping", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("overlap_param_gather", "ddp_num_buckets", "ddp_bucket_size", "ddp_average_in_collective"),
    *("ddp_pad_buckets_for_high_nccl_busbw", "no_align_grad_reduce", "no_align_param_gather"),
    *("distributed_backend", "distributed_timeout_minutes", "nccl_communicator_config_path"),
    *("disable_gloo_process_groups", "tp_comm_overlap", "tp_comm_overlap_cfg"),
)
# What is done about faults, when it ends, and how it is saved.
_FAULTS = (
    *("iterations_to_skip", "max_loss_jump", "rerun_mode", "no_check_for_nan_in_loss_and_grad"),
    *("check_for_large_grads", "check_weight_hash_across_dp_replicas_interval"),
)
_ENDS = ("exit_interval", "exit_duration_in_mins", "exit_signal_handler", "eval_interval")
_CHECKPOINTS = (
    *("save_interval", "save_retain_interval"),
    *("dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient"),
    *("no_ckpt_fully_parallel_save", "ckpt_fully_parallel_load", "dist_ckpt_workers"),
    *("ckpt_assume_constant_structure", "ckpt_fully_parallel_load_exchange_algo"),
)
_RECORDS = (
    *("log_interval", "log_throughput", "log_params_norm", "log_num_zeros_in_grad"),
    *("log_progress", "log_memory_interval", "log_device_memory_used", "log_energy"),
    *("log_timers_to_tensorboard", "log_memory_to_tensorboard", "log_world_size_to_tensorboard"),
    *("no_log_loss_scale_to_tensorboard", "no_barrier_with_level_1_timing", "timing_log_level"),
    *("timing_log_option", "logging_level", "tensorboard_dir", "tensorboard_log_interval"),
    *("tensorboard_queue_size", "wandb_project", "wandb_exp_name", "wandb_save_dir"),
    *("wandb_entity", "profile", "profile_step_start", "profile_step_end", "profile_ranks"),
    *("use_pytorch_profiler", "pytorch_profiler_collect_shapes", "record_shapes", "nvtx_ranges"),
    *("pytorch_profiler_collect_callstack", "record_memory_history", "memory_snapshot_path"),
)
# What may be another in a run that goes on: the same is trained, on the same samples, in the same
# order and number of steps, but for those that are left out on purpose after a jump of the loss.
CHANGEABLE = frozenset((*_KERNELS, *_LAYOUT, *_FAULTS, *_ENDS, *_CHECKPOINTS, *_RECORDS))
ACCEPTED = MODEL.union(_PRECISION, _SCHEDULE, CHANGEABLE)

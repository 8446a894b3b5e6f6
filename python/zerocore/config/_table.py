"""The DeepSpeed keys that are known here, one line a key. Translation and documentation are made from it."""

from __future__ import annotations

from typing import Any

from zerocore.config._keys import Auto, Key, Use, honoured, no_effect, renamed, unavailable, unavailable_block
from zerocore.config._types import (
    Betas,
    Bool,
    Float,
    IterationInt,
    LogSteps,
    LossScale,
    LrOrList,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    OffloadDevice,
    PositiveFloat,
    PositiveInt,
    Ratio,
    ScalePower,
    SeedInt,
    SpelledDType,
    Stage,
    Text,
    WarmupType,
)

_FILL = Auto.MUST_FILL
_ADAM = ("adam", "adamw")
_SGD = ("sgd",)
_ADAGRAD = ("adagrad",)
_MUON = ("muon",)
_BETAS = (*_ADAM, "lion", *_MUON)
_ANY = (*_ADAM, *_SGD, "lion", *_ADAGRAD, *_MUON)
_TORCHS = (*_ADAM, *_SGD, *_ADAGRAD)
_LR = ("warmuplr", "warmupdecaylr")
_TOTAL = ("warmupdecaylr", "warmupcosinelr")
_COSINE = ("warmupcosinelr",)
_WARMUP = (*_LR, *_COSINE)
_CYCLE = ("onecycle",)
_RANGE = ("lrrangetest",)
_BATCH = PositiveInt | None
_OFFLOAD = "zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "zero_optimization.offload_param"
_ON_CPU = "on the CPU all states lie in host memory; refused where an engine runs on CUDA"
_AIO = "only offload to NVMe reads it"
_SCALE = "bf16 needs no loss scale"
_COMMS = "every collective is counted"
_TORCH = "the optimizer is fused and has no such variants"

# Of the two offload blocks: name, type, why nothing is lost.
_OFFLOAD_KEYS: tuple[tuple[str, Any, str], ...] = (
    ("pin_memory", Bool, "no state is copied to a device"),
    ("nvme_path", Text, _AIO),
    ("buffer_count", PositiveInt, _AIO),
)
_OFFLOAD_PARAM_KEYS = (*_OFFLOAD_KEYS, ("buffer_size", PositiveInt, _AIO), ("max_in_cpu", NonNegativeInt, _AIO))
_OFFLOAD_OPTIMIZER_KEYS = (
    *_OFFLOAD_KEYS,
    ("pipeline_read", Bool, _AIO),
    ("pipeline_write", Bool, _AIO),
    ("fast_init", Bool, _AIO),
    ("ratio", Ratio, "the optimizer runs on the CPU"),
    ("super_offload", Bool, "the optimizer runs on the CPU"),
    ("cpuadam_cores_perc", Ratio, "the optimizer takes as many threads as torch does"),
)

TABLE: tuple[Key, ...] = (
    # Batch sizes
    honoured("train_batch_size", _BATCH, "train_batch_size"),
    honoured("train_micro_batch_size_per_gpu", _BATCH, "micro_batch_size"),
    honoured("gradient_accumulation_steps", _BATCH, "gradient_accumulation_steps"),
    honoured("managed_gradient_accumulation", Bool, "managed_gradient_accumulation"),
    # Optimizer
    honoured("optimizer.type", Text, "optimizer.type", auto=_FILL),
    honoured("optimizer.params.lr", NonNegativeFloat, "optimizer.lr", auto=_FILL, only=_ANY),
    honoured("optimizer.params.betas", Betas, "optimizer.betas", only=_BETAS),
    honoured("optimizer.params.eps", NonNegativeFloat, "optimizer.eps", only=(*_ADAM, *_ADAGRAD, *_MUON)),
    honoured("optimizer.params.weight_decay", NonNegativeFloat, "optimizer.weight_decay", only=_ANY),
    honoured("optimizer.params.bias_correction", Bool, "optimizer.bias_correction", only=(*_ADAM, *_MUON)),
    honoured("optimizer.params.adam_w_mode", Bool, "optimizer.type", only=(*_ADAM, *_MUON)),
    honoured("optimizer.params.torch_adam", Bool, "optimizer.weight_decay (its default only)", only=_ADAM),
    honoured(
        "optimizer.params.momentum",
        NonNegativeFloat,
        "optimizer.momentum (Muon: optimizer.muon_momentum)",
        only=(*_SGD, *_MUON),
    ),
    honoured("optimizer.params.dampening", Float, "optimizer.dampening", only=_SGD),
    honoured("optimizer.params.nesterov", Bool, "optimizer.nesterov", only=_SGD),
    honoured("optimizer.params.muon_lr", NonNegativeFloat, "optimizer.muon_lr (params.lr unless given)", only=_MUON),
    honoured("optimizer.params.adam_lr", NonNegativeFloat, "optimizer.lr (params.lr unless given)", only=_MUON),
    honoured("optimizer.params.ns_steps", NonNegativeInt, "optimizer.muon_ns_steps", only=_MUON),
    no_effect("optimizer.params.ns_method", Text, "one method, in fp32", only=_MUON),
    unavailable("optimizer.params.per_head_muon", "Muon by attention heads", only=_MUON),
    honoured("optimizer.params.lr_decay", NonNegativeFloat, "optimizer.lr_decay", only=_ADAGRAD),
    honoured(
        "optimizer.params.initial_accumulator_value",
        NonNegativeFloat,
        "optimizer.initial_accumulator_value",
        only=_ADAGRAD,
    ),
    unavailable("optimizer.params.amsgrad", "the AMSGrad variant", only=(*_ADAM, *_ADAGRAD)),
    unavailable("optimizer.params.maximize", "maximizing", only=_TORCHS),
    unavailable(
        "optimizer.params.fp32_optimizer_states",
        "16-bit optimizer state",
        off=(True,),
        only=(*_BETAS, *_ADAGRAD),
    ),
    unavailable(
        "optimizer.params.max_grad_norm", "clipping by the optimizer (set gradient_clipping)", off=(), only=_ANY
    ),
    no_effect("optimizer.params.foreach", Bool, _TORCH, only=_TORCHS),
    no_effect("optimizer.params.fused", Bool, _TORCH, only=_TORCHS),
    no_effect("optimizer.params.capturable", Bool, _TORCH, off=(False,), only=_ADAM),
    no_effect("optimizer.params.differentiable", Bool, _TORCH, off=(False,), only=_TORCHS),
    no_effect("optimizer.params.set_grad_none", Bool, "the engine takes gradients and frees them", only=_BETAS),
    no_effect("optimizer.legacy_fusion", Bool, _TORCH, off=(False,)),
    honoured("zero_allow_untested_optimizer", Bool, "allow_untested_optimizer"),
    no_effect("zero_force_ds_cpu_optimizer", Bool, "one optimizer serves every device"),
    # Schedule
    honoured("scheduler.type", Text, "scheduler.type", auto=_FILL),
    honoured("scheduler.params.warmup_min_lr", LrOrList, "scheduler.warmup_min_lr", only=_LR),
    honoured("scheduler.params.warmup_max_lr", LrOrList, "scheduler.warmup_max_lr", only=_LR),
    honoured(
        "scheduler.params.warmup_num_steps", NonNegativeInt, "scheduler.warmup_num_steps", auto=_FILL, only=_WARMUP
    ),
    honoured("scheduler.params.warmup_type", WarmupType, "scheduler.warmup_type", only=_WARMUP),
    honoured("scheduler.params.total_num_steps", PositiveInt, "scheduler.total_num_steps", auto=_FILL, only=_TOTAL),
    honoured("scheduler.params.warmup_min_ratio", Ratio, "scheduler.warmup_min_ratio", only=_COSINE),
    honoured("scheduler.params.cos_min_ratio", Ratio, "scheduler.cos_min_ratio", only=_COSINE),
    *(
        honoured(f"scheduler.params.{name}", type, f"scheduler.{name}", auto=auto, only=only)
        for name, type, auto, only in (
            ("cycle_min_lr", LrOrList, _FILL, _CYCLE),
            ("cycle_max_lr", LrOrList, _FILL, _CYCLE),
            ("cycle_first_step_size", PositiveInt, Auto.DEFAULT, _CYCLE),
            ("cycle_second_step_size", NonNegativeInt | None, Auto.DEFAULT, _CYCLE),
            ("cycle_first_stair_count", NonNegativeInt, Auto.DEFAULT, _CYCLE),
            ("cycle_second_stair_count", NonNegativeInt | None, Auto.DEFAULT, _CYCLE),
            ("decay_step_size", NonNegativeInt, Auto.DEFAULT, _CYCLE),
            ("decay_lr_rate", NonNegativeFloat, Auto.DEFAULT, _CYCLE),
            ("cycle_momentum", Bool, Auto.DEFAULT, _CYCLE),
            ("cycle_min_mom", LrOrList, Auto.DEFAULT, _CYCLE),
            ("cycle_max_mom", LrOrList, Auto.DEFAULT, _CYCLE),
            ("decay_mom_rate", NonNegativeFloat, Auto.DEFAULT, _CYCLE),
            ("lr_range_test_min_lr", LrOrList, Auto.DEFAULT, _RANGE),
            ("lr_range_test_step_size", PositiveInt, Auto.DEFAULT, _RANGE),
            ("lr_range_test_step_rate", NonNegativeFloat, Auto.DEFAULT, _RANGE),
            ("lr_range_test_staircase", Bool, Auto.DEFAULT, _RANGE),
        )
    ),
    honoured("scheduler.params.last_batch_iteration", IterationInt, "scheduler.last_batch_iteration"),
    # Gradients
    honoured("gradient_clipping", NonNegativeFloat, "gradient_clipping"),
    no_effect("prescale_gradients", Bool, "gradients are summed unscaled in fp32 and divided once", off=(False,)),
    no_effect("gradient_predivide_factor", PositiveFloat, "gradients are summed in fp32 and divided once", off=(1,)),
    unavailable("gradient_allreduce_op", "a sum of gradients in place of their mean", off=("mean",)),
    no_effect("sparse_gradients", Bool, "sparse gradients are made dense as they arrive", off=(False,)),
    honoured("communication_data_type", SpelledDType, "precision.reduce_dtype (null: that of computation)"),
    honoured("data_types.grad_accum_dtype", SpelledDType, "precision.accumulate_dtype (null: fp32)"),
    unavailable("data_types.param_dtype", "a parameter dtype apart from fp16 and bf16 blocks", off=()),
    unavailable("data_types.buffer_dtype", "a dtype for buffers", off=()),
    unavailable("data_types.keep_in_fp32_modules", "fp32 modules in a 16-bit model", off=([],)),
    no_effect("seq_parallel_communication_data_type", Text, "only sequence parallelism reads it"),
    no_effect("disable_allgather", Bool, "parameters are always gathered", off=(False,)),
    # Precision
    honoured("fp16.enabled", Bool, 'precision.dtype = "fp16"'),
    honoured("fp16.loss_scale", LossScale, "precision.loss_scale.static_scale (0: dynamic)"),
    honoured("fp16.initial_scale_power", ScalePower, "precision.loss_scale.initial_scale_power"),
    honoured("fp16.loss_scale_window", PositiveInt, "precision.loss_scale.window"),
    honoured("fp16.hysteresis", PositiveInt, "precision.loss_scale.hysteresis"),
    honoured("fp16.consecutive_hysteresis", Bool, "precision.loss_scale.consecutive_hysteresis"),
    honoured("fp16.min_loss_scale", NonNegativeFloat, "precision.loss_scale.min_scale"),
    unavailable("fp16.auto_cast", "casting inputs to fp16 (call .half() on floating-point inputs)"),
    unavailable("fp16.fp16_master_weights_and_grads", "16-bit master weights"),
    honoured("bf16.enabled", Bool, 'precision.dtype = "bf16"'),
    no_effect("bf16.check_grad_overflow", Bool, "steps with inf or NaN are always found", off=(True,)),
    no_effect("bf16.immediate_grad_update", Bool, "gradients go into fp32 sums bucket by bucket", off=(False,)),
    no_effect("bf16.loss_scale", LossScale, _SCALE),
    no_effect("bf16.initial_scale_power", NonNegativeInt, _SCALE),
    no_effect("bf16.loss_scale_window", NonNegativeInt, _SCALE),
    no_effect("bf16.hysteresis", NonNegativeInt, _SCALE),
    no_effect("bf16.min_loss_scale", NonNegativeFloat, _SCALE),
    unavailable("bf16.bf16_master_weights_and_grads", "16-bit master weights"),
    unavailable("bf16.bf16_optimizer_states", "16-bit optimizer state"),
    renamed("bfloat16", "bf16"),
    unavailable_block("torch_autocast", "autocast by the engine (use torch.autocast in the forward, or fp16 or bf16)"),
    unavailable_block("amp", "Apex AMP (use fp16 or bf16)"),
    # ZeRO
    honoured("zero_optimization.stage", Stage, "zero.stage"),
    honoured("zero_optimization.reduce_bucket_size", PositiveInt, "zero.bucket_numel"),
    no_effect("zero_optimization.allgather_bucket_size", NonNegativeInt, "reduce_bucket_size is the one bucket size"),
    no_effect("zero_optimization.allgather_partitions", Bool, "parameters are always gathered bucket by bucket"),
    no_effect("zero_optimization.contiguous_gradients", Bool, "buckets are always contiguous"),
    no_effect("zero_optimization.overlap_comm", Bool, "reduction always overlaps the backward"),
    no_effect("zero_optimization.reduce_scatter", Bool, "the result is the same"),
    no_effect("zero_optimization.use_multi_rank_bucket_allreduce", Bool, "buckets are cut evenly over the ranks"),
    no_effect("zero_optimization.compute_grad_norm", Bool, "the norm is always computed", off=(True,)),
    no_effect("zero_optimization.round_robin_gradients", Bool, "buckets are cut evenly over the ranks", off=(False,)),
    no_effect("zero_optimization.parameter_alignment", Bool, "parameters are always aligned", off=(False,)),
    no_effect("zero_optimization.ignore_unused_parameters", Bool, "unused parameters are always skipped", off=(True,)),
    no_effect("zero_optimization.legacy_stage1", Bool, "there is one stage 1", off=(False,)),
    no_effect("zero_optimization.load_from_fp32_weights", Bool, "master weights are what is loaded", off=(True,)),
    no_effect("zero_optimization.elastic_checkpoint", Bool, "every checkpoint loads on any number of ranks"),
    no_effect(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        Bool,
        "the momentum is sharded, in memory",
        off=(False,),
    ),
    honoured("zero_optimization.stage3_max_live_parameters", PositiveInt, "zero.max_live_numel"),
    honoured("zero_optimization.stage3_max_reuse_distance", NonNegativeInt, "zero.max_reuse_numel"),
    honoured("zero_optimization.stage3_prefetch_bucket_size", NonNegativeInt, "zero.prefetch_numel"),
    honoured("zero_optimization.stage3_param_persistence_threshold", NonNegativeInt, "zero.persistent_param_numel"),
    honoured("zero_optimization.stage3_model_persistence_threshold", NonNegativeInt, "zero.persistent_total_numel"),
    honoured("zero_optimization.stage3_gather_16bit_weights_on_model_save", Bool, "zero.gather_16bit_weights_on_save"),
    honoured(
        "zero_optimization.stage3_module_granularity_threshold", NonNegativeInt, "zero.unit_numel (0: its default)"
    ),
    honoured("zero_optimization.leaf_module.classes", Names, "zero.unit_classes"),
    honoured("zero_optimization.leaf_module.names", Names, "zero.unit_names"),
    honoured("zero_optimization.leaf_module.name_suffixes", Names, "zero.unit_names (`x` as the pattern `*x`)"),
    no_effect("zero_optimization.sub_group_size", NonNegativeInt, "the optimizer runs bucket by bucket"),
    no_effect("zero_optimization.stage3_use_all_reduce_for_fetch_params", Bool, "shards are always all-gathered"),
    no_effect("zero_optimization.stage3_allgather_sequential", Bool, "units are always gathered one after the other"),
    no_effect(
        "zero_optimization.memory_efficient_linear",
        Bool,
        "a weight that a layer saved for backward is released all the same",
    ),
    no_effect("zero_optimization.override_module_apply", Bool, "initialisers always see whole parameters"),
    no_effect(
        "zero_optimization.pipeline_loading_checkpoint", Bool, "each rank reads only what it keeps", off=(False,)
    ),
    no_effect("zero_optimization.log_trace_cache_warnings", Bool, "the order of units may change", off=(False,)),
    no_effect("zero_optimization.enable_sanity_checks", Bool, "ranks are always compared"),
    no_effect(f"{_OFFLOAD}.device", OffloadDevice, _ON_CPU, off=("none",)),
    no_effect(f"{_OFFLOAD_PARAM}.device", OffloadDevice, f"{_ON_CPU}; DeepSpeed reads it in stage 3", off=("none",)),
    *(no_effect(f"{_OFFLOAD}.{name}", type, note) for name, type, note in _OFFLOAD_OPTIMIZER_KEYS),
    *(no_effect(f"{_OFFLOAD_PARAM}.{name}", type, note) for name, type, note in _OFFLOAD_PARAM_KEYS),
    *(
        no_effect(f"zero_optimization.{name}", Bool, f"{_ON_CPU}; DeepSpeed's new name is {new}", off=(False,))
        for name, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
            ("cpu_offload_params", "offload_param"),
            ("cpu_offload_use_pin_memory", "offload_optimizer.pin_memory"),
        )
    ),
    unavailable_block("zero_optimization.zenflow", "ZenFlow"),
    unavailable("zero_optimization.zero_hpz_partition_size", "hierarchical partitioning", off=(1,)),
    unavailable("zero_optimization.zero_quantized_weights", "quantized communication"),
    unavailable("zero_optimization.zero_quantized_nontrainable_weights", "quantized communication"),
    unavailable("zero_optimization.zero_quantized_gradients", "quantized communication"),
    unavailable_block("zero_optimization.zeropp_loco_param", "quantized communication"),
    unavailable("zero_optimization.mics_shard_size", "MiCS sharding", off=(-1,)),
    unavailable("zero_optimization.mics_hierarchical_params_gather", "MiCS sharding"),
    renamed(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    renamed(
        "zero_optimization.gather_fp16_weights_on_model_save",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    *(
        renamed(f"zero_optimization.{name}", f"zero_optimization.stage3_{name}")
        for name in (
            "max_live_parameters",
            "max_reuse_distance",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    ),
    # Data and seed
    honoured("seed", SeedInt, "seed (not a DeepSpeed key)"),
    honoured("dataloader_drop_last", Bool, "data.drop_last"),
    unavailable_block("data_efficiency", "data sampling and routing by the engine"),
    unavailable_block("curriculum_learning", "curriculum learning"),
    # Reports
    honoured("steps_per_print", LogSteps, "steps_per_print"),
    honoured("wall_clock_breakdown", Bool, "wall_clock_breakdown"),
    no_effect("memory_breakdown", Bool, "Engine.memory_report() tells", off=(False,)),
    no_effect("dump_state", Bool, "print Config.describe()", off=(False,)),
    no_effect("log_level", Text, 'set the level of logging.getLogger("zerocore")'),
    no_effect("disable_python_gc", Bool, "garbage collection is left alone", off=(False,)),
    no_effect("vocabulary_size", NonNegativeInt, "DeepSpeed only warns by it"),
    no_effect("timers", None, "wall_clock_breakdown prints times, Engine.profile() shows them"),
    *(honoured(f"{name}.enabled", Bool, f"{name} (false: None)") for name in ("tensorboard", "csv_monitor", "wandb")),
    *(
        honoured(f"{block}.{name}", Text, f"{block}.{name}")
        for block in ("tensorboard", "csv_monitor")
        for name in ("output_path", "job_name")
    ),
    honoured("wandb.project", Text, "wandb.project"),
    honoured("wandb.group", Text | None, "wandb.group"),
    honoured("wandb.team", Text | None, "wandb.team"),
    unavailable_block("comet", "the Comet monitor"),
    honoured("flops_profiler.enabled", Bool, "flops_profiler (false: None)"),
    honoured("flops_profiler.profile_step", IterationInt, "flops_profiler.profile_step"),
    honoured("flops_profiler.module_depth", IterationInt, "flops_profiler.module_depth"),
    honoured("flops_profiler.top_modules", PositiveInt, "flops_profiler.top_modules"),
    honoured("flops_profiler.detailed", Bool, "flops_profiler.detailed"),
    honoured("flops_profiler.output_file", Text | None, "flops_profiler.output_file"),
    honoured("flops_profiler.recompute_fwd_factor", NonNegativeFloat, "flops_profiler.recompute_fwd_factor"),
    honoured("comms_logger.enabled", Bool, "comms_logger"),
    no_effect("comms_logger.verbose", Bool, "Engine.profile() shows each collective", off=(False,)),
    no_effect("comms_logger.prof_all", Bool, _COMMS, off=(True,)),
    no_effect("comms_logger.prof_ops", Names, _COMMS, off=([],)),
    no_effect("comms_logger.debug", Bool, "collectives have labels as it is", off=(False,)),
    # Activation checkpointing
    honoured(
        "activation_checkpointing.partition_activations",
        Bool,
        "activation_checkpointing.partition_activations (true sets enabled as well)",
    ),
    honoured(
        "activation_checkpointing.cpu_checkpointing",
        Bool,
        "activation_checkpointing.cpu_checkpointing (true sets enabled as well)",
    ),
    honoured(
        "activation_checkpointing.number_checkpoints",
        NonNegativeInt | None,
        "activation_checkpointing.enabled (true above 0; every unit is checkpointed)",
    ),
    no_effect(
        "activation_checkpointing.contiguous_memory_optimization",
        Bool,
        "saved inputs stay where they are, without a copy",
        off=(False,),
    ),
    no_effect(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        Bool,
        "copies to host memory are ordered with the computation",
        off=(False,),
    ),
    no_effect("activation_checkpointing.profile", Bool, "Engine.profile() shows times", off=(False,)),
    # Other capabilities
    *(
        no_effect(f"aio.{name}", type, _AIO)
        for name, type in (
            ("block_size", PositiveInt),
            ("queue_depth", PositiveInt),
            ("intra_op_parallelism", PositiveInt),
            ("thread_count", PositiveInt),
            ("single_submit", Bool),
            ("overlap_events", Bool),
            ("use_gds", Bool),
        )
    ),
    no_effect("checkpoint.tag_validation", Text, "the ranks' tags are always compared, and a difference is an error"),
    no_effect("checkpoint.load_universal", Bool, "every checkpoint loads on any number of ranks"),
    no_effect("checkpoint.use_node_local_storage", Bool, "a checkpoint is a folder that all ranks see", off=(False,)),
    no_effect("checkpoint.checkpoint_serialization", Bool, "checkpoints hold no pickled objects"),
    no_effect("checkpoint.parallel_write.pipeline_stage", Bool, "every rank writes its share"),
    unavailable("checkpoint.writer", "a choice of the checkpoint's writer", off=()),
    unavailable_block("datastates_ckpt", "checkpointing by DataStates"),
    unavailable_block("nebula", "checkpointing by Nebula"),
    unavailable_block("pipeline", "pipeline parallelism", switches=("enabled", "stages")),
    unavailable_block("tensor_parallel", "tensor parallelism", switches=("enabled", "autotp_size", "tp_size")),
    unavailable_block("expert_parallel", "expert parallelism"),
    unavailable("use_data_before_expert_parallelism", "expert parallelism"),
    unavailable("sequence_parallel_size", "sequence parallelism", off=(1,)),
    unavailable("data_parallel_size", "a device mesh by configuration", off=()),
    unavailable_block("elasticity", "choosing batch sizes by elasticity (they work for any number of ranks)"),
    unavailable_block("autotuning", "autotuning"),
    unavailable_block("compile", "DeepCompile (use torch.compile)", switches=("deepcompile",)),
    unavailable_block("hybrid_engine", "the hybrid engine"),
    unavailable_block("compression_training", "compression"),
    unavailable_block("weight_quantization", "quantization"),
    unavailable_block("quantize_training", "quantization"),
    unavailable_block("eigenvalue", "eigenvalue estimation"),
    unavailable_block("sparse_attention", "sparse attention"),
    unavailable_block("progressive_layer_drop", "progressive layer drop"),
    unavailable("graph_harvesting", "graph harvesting"),
)

# The native key of each honoured key, by the last part of its name, for those who take one for the other.
NATIVE_NAMES = {
    key.path.rpartition(".")[2]: key.note.partition(" ")[0]
    for key in TABLE
    if key.use is Use.HONOURED and not key.path.endswith((".type", ".enabled"))
}

# Names that are often written in place of another one, and too unlike it to be found by spelling.
HINTS = {
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "monitor_config": "tensorboard, wandb or csv_monitor at the top level",
    "tensor_parallel_size": "tensor_parallel.autotp_size",
    "pipeline_parallel_size": "pipeline.stages",
    "pipeline_parallel": "pipeline",
    "dynamic_train": "data_efficiency.data_routing",
}

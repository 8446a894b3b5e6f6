"""DeepSpeed's configuration: what each key becomes, and what is said of those that become nothing."""

import base64
import dataclasses
import json
import math
import sys
import warnings
from pathlib import Path

import pytest
from zerocore.config import (
    ActivationCheckpointingConfig,
    Config,
    ConfigWarning,
    LossScaleConfig,
    OptimizerConfig,
    SchedulerConfig,
    ZeroConfig,
    _migrating,
)
from zerocore.config._build import OPTIMIZERS, SCHEDULERS
from zerocore.config._document import document
from zerocore.config._keys import Auto, Use
from zerocore.config._schema import dotted_keys
from zerocore.config._table import TABLE
from zerocore.config._types import one_of
from zerocore.errors import ConfigError

ROOT = Path(__file__).parents[2]
BATCH = {"train_micro_batch_size_per_gpu": 2}


def translated(**blocks):
    """The native configuration, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Config.from_deepspeed({**BATCH, **blocks})


def message_of(source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as caught:
            Config.from_deepspeed(source)
    return str(caught.value)


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def with_type(key, value):
    """A configuration with one key of the table, and the type that its section needs."""
    block = nested(key.path, value)
    section, _, rest = key.path.partition(".")
    kinds = {"optimizer": "adamw", "scheduler": "warmuplr"}
    if section in kinds and rest != "type":
        block[section]["type"] = key.only[0] if key.only else kinds[section]
    if ".offload_" in key.path and not key.path.endswith(".device"):
        block[section][key.path.split(".")[1]]["device"] = "cpu"  # else it is off
    return {**BATCH, **block}


def test_a_whole_configuration():
    config = Config.from_deepspeed(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.5,
            "steps_per_print": 100,
            "seed": 7,
            "dataloader_drop_last": True,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 10, "total_num_steps": 100},
            },
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "initial_scale_power": 12,
                "loss_scale_window": 500,
                "hysteresis": 4,
                "consecutive_hysteresis": True,
                "min_loss_scale": 2,
            },
            "bf16": {"enabled": False},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7},
        }
    )
    assert config.resolve(2).micro_batches == 16
    assert not config.managed_gradient_accumulation
    assert (config.gradient_clipping, config.steps_per_print, config.seed) == (0.5, 100, 7)
    assert config.data.drop_last
    assert (config.optimizer.type, config.optimizer.lr, config.optimizer.betas) == ("adamw", 2e-4, (0.9, 0.95))
    assert (config.optimizer.eps, config.optimizer.weight_decay) == (1e-6, 0.1)
    assert (config.scheduler.type, config.scheduler.total_num_steps) == ("WarmupDecayLR", 100)
    assert (config.scheduler.warmup_max_lr, config.scheduler.warmup_num_steps) == (2e-4, 10)
    assert config.precision.dtype == "fp16"
    assert config.precision.loss_scale == LossScaleConfig(
        initial_scale_power=12, window=500, hysteresis=4, consecutive_hysteresis=True, min_scale=2.0
    )
    assert (config.zero.stage, config.zero.bucket_numel) == (2, 50_000_000)


def test_deepspeeds_defaults_hold():
    config = translated()
    assert config.gradient_clipping == 1.0
    assert config.zero.stage == 0
    assert config.precision.dtype == "fp32"
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.zero.bucket_numel == Config().zero.bucket_numel


@pytest.mark.parametrize(
    ("type", "params", "expected"),
    [  # -> native type, weight decay
        ("Adam", {}, ("adamw", 0.0)),
        ("Adam", {"adam_w_mode": True, "weight_decay": 0.1}, ("adamw", 0.1)),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, ("adam", 0.1)),
        ("Adam", {"torch_adam": True}, ("adamw", 0.01)),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, ("adam", 0.0)),
        ("AdamW", {}, ("adamw", 0.0)),
        ("AdamW", {"torch_adam": True}, ("adamw", 0.01)),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.0}, ("adamw", 0.0)),
        ("adamw", {"weight_decay": 0.1}, ("adamw", 0.1)),
        ("SGD", {"weight_decay": 0.1}, ("sgd", 0.1)),
    ],
)
def test_which_adam_is_meant(type, params, expected):
    optimizer = translated(optimizer={"type": type, "params": params}).optimizer
    assert (optimizer.type, optimizer.weight_decay) == expected
    assert optimizer.lr == 1e-3


def test_adamw_decouples_whatever_adam_w_mode_says():
    source = {**BATCH, "optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}
    with pytest.warns(ConfigWarning, match="adam_w_mode: AdamW decouples weight decay"):
        assert Config.from_deepspeed(source).optimizer.type == "adamw"


def test_lion_and_adagrad_have_deepspeeds_defaults():
    lion = translated(optimizer={"type": "lion", "params": {"betas": [0.95, 0.98]}}).optimizer
    assert lion == OptimizerConfig(type="lion", lr=1e-3, betas=(0.95, 0.98), weight_decay=0.0)
    adagrad = translated(optimizer={"type": "AdaGrad"}).optimizer
    assert adagrad == OptimizerConfig(type="adagrad", lr=1e-2, eps=1e-10, weight_decay=0.0)
    given = {"lr": 0.5, "eps": 1e-8, "lr_decay": 0.1, "initial_accumulator_value": 1, "weight_decay": 0.1}
    assert translated(optimizer={"type": "Adagrad", "params": given}).optimizer == OptimizerConfig(
        type="adagrad", **given
    )


def test_schedules_of_torch_take_their_own_arguments():
    params = {"T_max": 10, "eta_min": 1e-5}
    assert translated(scheduler={"type": "CosineAnnealingLR", "params": params}).scheduler == SchedulerConfig(
        type="CosineAnnealingLR", torch_params=params
    )
    assert translated(scheduler={"type": "exponentiallr"}).scheduler == SchedulerConfig(type="ExponentialLR")
    for wrong, text in (
        ({"T_max": "auto"}, 'scheduler.params.T_max: got "auto", expected a value.'),
        (3, "params: got 3"),
    ):
        assert text in message_of({**BATCH, "scheduler": {"type": "CosineAnnealingLR", "params": wrong}})


def test_muon_has_a_learning_rate_for_each_half():
    defaults = {"betas": (0.9, 0.95), "eps": 1e-10}
    muon = translated(optimizer={"type": "Muon"}).optimizer
    assert muon == OptimizerConfig(type="muon", lr=3e-4, muon_lr=0.02, **defaults)
    muon = translated(optimizer={"type": "Muon", "params": {"lr": 0.5, "momentum": 0.9, "ns_steps": 3}}).optimizer
    assert muon == OptimizerConfig(type="muon", lr=0.5, muon_lr=0.5, muon_momentum=0.9, muon_ns_steps=3, **defaults)
    params = {"lr": 0.5, "muon_lr": 0.25, "adam_lr": 0.125, "weight_decay": 0.1}
    muon = translated(optimizer={"type": "muon", "params": params}).optimizer
    assert muon == OptimizerConfig(type="muon", lr=0.125, muon_lr=0.25, weight_decay=0.1, **defaults)
    assert "adam_w_mode: got false, expected true" in message_of(
        {**BATCH, "optimizer": {"type": "Muon", "params": {"adam_w_mode": False}}}
    )


def test_cycles_and_range_tests():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": [0.2], "cycle_first_step_size": 5, "cycle_min_mom": 0.7}
    assert translated(scheduler={"type": "onecycle", "params": params}).scheduler == SchedulerConfig(
        type="OneCycle", **params
    )
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 5, "lr_range_test_staircase": True}
    assert translated(scheduler={"type": "LRRangeTest", "params": params}).scheduler == SchedulerConfig(
        type="LRRangeTest", **params
    )


def test_sgd_and_adam_options():
    params = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    sgd = translated(optimizer={"type": "SGD", "params": params}).optimizer
    assert (sgd.type, sgd.lr, sgd.momentum, sgd.nesterov) == ("sgd", 0.1, 0.9, True)
    assert not translated(optimizer={"type": "Adam", "params": {"bias_correction": False}}).optimizer.bias_correction


def test_the_top_learning_rate_of_warmups():
    assert translated(scheduler={"type": "WarmupLR"}).scheduler.warmup_max_lr is None
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}
    assert translated(scheduler=decay).scheduler.warmup_max_lr == 1e-3


def test_a_static_loss_scale_leaves_the_dynamic_keys_out():
    precision = translated(fp16={"enabled": True, "loss_scale": 512, "min_loss_scale": 0}).precision
    assert precision.loss_scale == LossScaleConfig(static_scale=512.0)


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        ({"fp16": {"enabled": False, "loss_scale_window": 10}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"fp16": None, "bf16": {}}, "fp32"),
    ],
)
def test_precision(blocks, dtype):
    assert translated(**blocks).precision.dtype == dtype


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_the_old_boolean_form_of_zero(value, stage):
    with pytest.warns(ConfigWarning, match=f'zero_optimization: {str(value).lower()} is now {{"stage": {stage}}}'):
        assert Config.from_deepspeed({**BATCH, "zero_optimization": value}).zero.stage == stage


def test_the_old_name_of_bf16():
    with pytest.warns(ConfigWarning, match="newer names:\n  bfloat16: now bf16"):
        assert Config.from_deepspeed({**BATCH, "bfloat16": {"enabled": True}}).precision.dtype == "bf16"
    both = {**BATCH, "bfloat16": {"enabled": True}, "bf16": {"enabled": True}}
    assert message_of(both) == "[config] bfloat16: got both this and its newer name bf16, expected one. Remove this."


def test_stage_3():
    zero = translated(
        zero_optimization={
            "stage": 3,
            "stage3_max_live_parameters": 1e6,
            "stage3_max_reuse_distance": 2e6,
            "stage3_prefetch_bucket_size": 3e6,
            "stage3_param_persistence_threshold": 4e6,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_module_granularity_threshold": 5000,
            "leaf_module": {
                "classes": ["Experts", "models.Block"],
                "names": ["body.head"],
                "name_suffixes": [".moe[0]"],
            },
        }
    ).zero
    assert zero == ZeroConfig(
        stage=3,
        max_live_numel=1_000_000,
        max_reuse_numel=2_000_000,
        prefetch_numel=3_000_000,
        persistent_param_numel=4_000_000,
        persistent_total_numel=sys.maxsize,
        gather_16bit_weights_on_save=True,
        unit_numel=5000,
        unit_classes=("Experts", "models.Block"),
        unit_names=("body.head", "*.moe[[]0]"),
    )
    assert translated(zero_optimization={"stage": 3, "stage3_module_granularity_threshold": 0}).zero == ZeroConfig(
        stage=3
    )


def test_keys_of_stage_3_are_accepted_with_every_stage():
    zero = {"stage": 1, "stage3_prefetch_bucket_size": 5, "leaf_module": {"classes": []}}
    assert translated(zero_optimization=zero).zero == ZeroConfig(stage=1, prefetch_numel=5)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"partition_activations": True}, {"enabled": True, "partition_activations": True}),
        ({"cpu_checkpointing": True}, {"enabled": True, "cpu_checkpointing": True}),
        ({"number_checkpoints": 4, "profile": False}, {"enabled": True}),
        ({"number_checkpoints": 0, "cpu_checkpointing": False}, {}),
        ({"partition_activations": False, "number_checkpoints": None}, {}),
    ],
)
def test_activation_checkpointing_is_on_when_anything_is_asked_of_it(block, expected):
    assert translated(activation_checkpointing=block).activation_checkpointing == ActivationCheckpointingConfig(
        **expected
    )


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("fp32", "fp32"),
        ("float32", "fp32"),
        ("float", "fp32"),
        ("fp16", "fp16"),
        ("FP16", "fp16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("bfp16", "bf16"),
    ],
)
def test_dtypes_of_gradients(spelling, dtype):
    precision = translated(
        communication_data_type=spelling, data_types={"grad_accum_dtype": spelling}, bf16={"enabled": True}
    ).precision
    assert (precision.dtype, precision.reduce_dtype, precision.accumulate_dtype) == ("bf16", dtype, dtype)
    precision = translated(communication_data_type=spelling, fp16={"enabled": True, "loss_scale": 2}).precision
    assert (precision.reduce_dtype, precision.accumulate_dtype) == (dtype, "fp32")


def test_no_steps_between_reports_is_never():
    assert translated(steps_per_print=math.inf).steps_per_print is None


@pytest.mark.parametrize(
    "block",
    [
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "buffer_count": 5, "buffer_size": 1e8}}},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "cpu_offload": False}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"compile": {"deepcompile": False, "double_buffer": True}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensorboard": {"enabled": False, "output_path": "logs"}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": None}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "communication_data_type": None},
        {"wall_clock_breakdown": False},
    ],
)
def test_what_asks_for_nothing_is_accepted_without_a_word(block):
    assert dataclasses.replace(translated(**block), zero=ZeroConfig()) == translated()


def test_keys_without_effect_are_told_in_one_warning():
    source = {
        **BATCH,
        "_comment": "ours",
        "zero_optimization": {"stage": 1, "contiguous_gradients": True, "overlap_comm": False},
        "memory_breakdown": True,
    }
    with pytest.warns(ConfigWarning) as caught:
        Config.from_deepspeed(source)
    assert [str(each.message) for each in caught] == [
        "[config] these DeepSpeed keys have no effect in zerocore and can be removed:\n"
        "  _comment: a name that starts with an underscore is taken for a comment\n"
        "  zero_optimization.contiguous_gradients: buckets are always contiguous\n"
        "  zero_optimization.overlap_comm: reduction always overlaps the backward\n"
        "  memory_breakdown: Engine.memory_report() tells"
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_deepspeed(source, warn=False)


def test_auto_with_a_sensible_default_counts_as_not_given():
    source = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": 5}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    with pytest.warns(
        ConfigWarning, match='nothing fills "auto" in here, so these keys count as not given: train_batch'
    ):
        config = Config.from_deepspeed(source)
    assert config.resolve(2).train_batch_size == 8
    assert config.precision.dtype == "fp32"
    assert config.gradient_clipping == 1.0
    assert config.scheduler.warmup_max_lr is None
    assert config.zero.bucket_numel == Config().zero.bucket_numel


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}},
            "zero_optimization.offload_param.device: on the CPU all states lie in host memory; refused where an engine "
            "runs on CUDA; DeepSpeed reads it in stage 3\n  zero_optimization.offload_param.pin_memory: no state is "
            "copied to a device",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "auto", "pin_memory": True}}},
            'nothing fills "auto" in here, so these keys count as not given: zero_optimization.offload_optimizer'
            ".device",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload: on the CPU all states lie in host memory; refused where an engine runs on "
            "CUDA; DeepSpeed's new name is offload_optimizer",
        ),
        ({"prescale_gradients": "auto"}, "these keys count as not given: prescale_gradients"),
        (
            {"zero_optimization": {"gather_fp16_weights_on_model_save": True}},
            "zero_optimization.gather_fp16_weights_on_model_save: now "
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_what_deepspeed_drops_in_silence_is_said(block, said):
    with pytest.warns(ConfigWarning) as caught:
        Config.from_deepspeed({**BATCH, **block})
    assert [str(each.message).endswith(said) for each in caught] == [True]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"},
            'train_micro_batch_size_per_gpu and train_batch_size: got "auto", expected an integer >= 1. Nothing fills '
            '"auto" '
            "in here; write how many samples a rank processes at once into train_micro_batch_size_per_gpu.",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            'optimizer.params.lr: got "auto", expected a number >= 0. Nothing fills "auto" in here; write the value.',
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: got 4, expected 0, 1, 2 or 3."),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage: got -1, expected 0, 1, 2 or 3."),
        (
            {"zero_optimization": {"stage": "2"}},
            'zero_optimization.stage: got "2", expected 0, 1, 2 or 3. Remove the quotes: 2.',
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 0}},
            "zero_optimization.stage3_max_live_parameters: got 0, expected an integer >= 1.",
        ),
        (
            {"zero_optimization": {"leaf_module": {"classes": "Block"}}},
            'zero_optimization.leaf_module.classes: got "Block", expected a list of strings.',
        ),
        (
            {"communication_data_type": "int8"},
            'communication_data_type: got "int8", expected "fp32", "bf16" or "fp16".',
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": -5}},
            "zero_optimization.reduce_bucket_size: got -5, expected an integer >= 1.",
        ),
        (
            {"zero_optimization": {"allgather_bucket_size": -5}},
            "zero_optimization.allgather_bucket_size: got -5, expected an integer >= 0.",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}},
            'zero_optimization.offload_optimizer.device: got "nvme", expected "none" or "cpu" (offload to NVMe is not '
            "available in this version).",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memroy": True}}},
            "zero_optimization.offload_optimizer.pin_memroy: got an unknown key, expected one of those in "
            "docs/configuration.md. Did you mean zero_optimization.offload_optimizer.pin_memory? Rename or remove it.",
        ),
        (
            {"zero_optimization": {"offload_param": "cpu"}},
            'zero_optimization.offload_param: got "cpu", expected an object: {"device": "cpu"}.',
        ),
        (
            {"prescale_gradients": 1},
            "prescale_gradients: got 1, expected true or false.",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled: got true together with bf16.enabled, expected one of them at most. Set one to false.",
        ),
        (
            {"fp16": {"enabled": "true"}},
            'fp16.enabled: got "true", expected true or false. Remove the quotes: true.',
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            "fp16.min_loss_scale: got 0, expected a number > 0 and at most the initial scale 2^16 when loss_scale is 0 "
            "(dynamic).",
        ),
        ({"bf16": True}, 'bf16: got true, expected an object: {"enabled": true}.'),
        (
            {"optimizer": "AdamW"},
            'optimizer: got "AdamW", expected an object: {"type": "AdamW", "params": {"lr": 1e-4}}.',
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1}}},
            f'optimizer.type: got "Lamb", expected {one_of(OPTIMIZERS.values())}. Other optimizers are not available '
            "in this version.",
        ),
        (
            {"optimizer": {"params": {"lr": 1}}},
            f"optimizer.type: got nothing, expected {one_of(OPTIMIZERS.values())}. Set it, or remove optimizer.",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
            "optimizer.params.betas: got [0.9, 0.9], expected a parameter of SGD, which takes lr, weight_decay, "
            "momentum, "
            "dampening, nesterov. Rename or remove it.",
        ),
        (
            {"scheduler": {"type": "LambdaLR", "params": {"lr_lambda": 10}}},
            f'scheduler.type: got "LambdaLR", expected {one_of(SCHEDULERS.values())}. Pass another schedule '
            "to Engine(lr_scheduler=...).",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
            "scheduler.params.cycle_max_lr: got nothing, expected the learning rate in its middle. OneCycle needs it.",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}},
            "scheduler.params.total_num_steps: got nothing, expected the number of steps of the run. WarmupDecayLR "
            "needs it.",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}},
            'scheduler.params.warmup_type: got "cosine", expected "log" or "linear".',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}},
            "scheduler.params.warmup_num_steps: got -1, expected an integer >= 0.",
        ),
        ({"steps_per_print": "epoch"}, 'steps_per_print: got "epoch", expected an integer >= 1.'),
        (
            {"gradient_predivide_factor": True},  # not 1, which would be off
            "gradient_predivide_factor: got true, expected a number > 0.",
        ),
        ({"gradient_clipping": None}, "gradient_clipping: got null, expected a number >= 0."),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_expected(source, text):
    assert message_of({**BATCH, **source}) == f"[config] {text}"


@pytest.mark.parametrize(
    ("source", "near"),
    [
        ({"step_per_print": 1}, "steps_per_print"),
        ({"train_batchsize": 1}, "train_batch_size"),
        ({"gradient_accumulation_steps ": 1}, "gradient_accumulation_steps"),
        ({"max_grad_norm": 1}, "gradient_clipping"),
        ({"grad_accum_dtype": "bf16"}, "data_types.grad_accum_dtype"),
        ({"zero_optimization": {"stages": 2}}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"stage3_param_persitance_threshold": 1}},
            "zero_optimization.stage3_param_persistence_threshold",
        ),
        ({"zero_optimization": {"aio": {}}}, "aio"),
        ({"optimizer": {"type": "Adam", "eps": 1}}, "optimizer.params.eps"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "optimizer.params.lr"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "scheduler.params.warmup_num_steps"),
        ({"fp16": {"enable": True}}, "fp16.enabled"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(source, near):
    message = message_of({**BATCH, **source})
    assert f"got an unknown key, expected one of those in docs/configuration.md. Did you mean {near}?" in message


def test_all_problems_are_reported_at_once():
    message = message_of(
        {"zero_optimization": {"stage": 4, "offload_param": {"device": "nvme"}}, "qqq": 1, "amp": True}
    )
    assert message.splitlines()[0] == "[config] 4 problems in this configuration:"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"train_batch_size": 6,\n "train_batch_size": "auto"}',
            'got the key "train_batch_size" twice in one object (6, then "auto"), expected each key once. Remove one '
            "of them.",
        ),
        (
            '{\n  "train_batch_size": 8, // all ranks\n  "seed": 1\n}',
            "line 2: got a comment, expected strict JSON. Remove it; JSON has no comments. The line is: "
            "'\"train_batch_size\": 8, // all ranks'",
        ),
        (
            '{\n  "train_batch_size": 8, # all ranks\n  "seed": 1\n}',
            "line 2: got a comment, expected strict JSON. Remove it; JSON has no comments. The line is: "
            "'\"train_batch_size\": 8, # all ranks'",
        ),
        (
            '{\n  "train_batch_size": 8,\n}',
            "line 2: got a comma after the last element, expected strict JSON. Remove the comma. The line is: "
            "'\"train_batch_size\": 8,'",
        ),
        (
            '{\n  "optimizer": {"params": {"betas": [0.9, 0.95,]}}\n}',
            "line 2: got a comma after the last element, expected strict JSON. Remove the comma. The line is: "
            '\'"optimizer": {"params": {"betas": [0.9, 0.95,]}}\'',
        ),
        (
            '{\n  "fp16": {"enabled": True}\n}',
            'line 2: got Python\'s True, expected strict JSON. Write true. The line is: \'"fp16": {"enabled": True}\'',
        ),
        (
            "{'train_batch_size': 8}",
            "line 1: got a single quote, expected strict JSON. Strings and keys stand in double quotes. The line is: "
            "\"{'train_batch_size': 8}\"",
        ),
        (
            '{"train_batch_size": 8}\n```\n',
            "line 2: got text after the configuration's end, expected strict JSON. Remove it. The line is: '```'",
        ),
        (
            '{\n  "zero_optimization": {"stage": 1}\n',
            "line 2: got the end of the file, expected strict JSON. A closing brace, bracket or quote is missing. The "
            "line is: "
            '\'"zero_optimization": {"stage": 1}\'',
        ),
        (
            '{\n  "seed": 1\n  "train_batch_size": 8\n}',
            "line 3: got something else (expecting ',' delimiter), expected strict JSON. Correct it. The line is: "
            "'\"train_batch_size\": 8'",
        ),
    ],
)
def test_a_file_that_is_not_strict_json_names_the_line(tmp_path, text, expected):
    path = tmp_path / "ds.json"
    path.write_text(text)
    separator = ": " if text.startswith('{"train_batch_size": 6') else ", "
    assert message_of(path) == f"[config] {path}{separator}{expected}"


def test_a_file_is_read_and_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '\ufeff{"train_batch_size": 8}', encoding="utf-8"
    )  # with a byte order mark, as Windows editors write
    assert (
        Config.from_deepspeed(path)
        == Config.from_deepspeed(str(path))
        == Config.from_deepspeed({"train_batch_size": 8})
    )
    path.write_text("[1, 2]")
    assert message_of(path) == f"[config] {path}: got [1, 2], expected an object: {{...}}."
    path.write_bytes(b"\xff\xfe{\x00}\x00")
    assert "cannot be read: it is not UTF-8 text." in message_of(path)
    path.write_text('{"seed": -1, "fp16": 3}')
    assert message_of(path).startswith(f"[config] 2 problems in {path}:")
    assert "cannot be read: No such file or directory. Check the path" in message_of(tmp_path / "none.json")
    assert "cannot be read" in message_of("a\0b")
    assert "cannot be read" in message_of('{"train_batch_size": 8}')
    assert message_of(8) == "[config] config: got int, expected a zerocore.Config, a dict or a path."


def test_a_configuration_as_base64():
    """As DeepSpeed's launcher hands it to scripts."""
    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}, "_": "\u00ff\u00fe\u00ff"})
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert Config.from_deepspeed(encoded, warn=False) == Config.from_deepspeed(json.loads(text), warn=False)
    broken = base64.urlsafe_b64encode(b'{"train_batch_size": 8,}').decode()
    assert message_of(broken).startswith("[config] this base64 configuration, line 1: got a comma after the last")
    assert "cannot be read" in message_of(base64.b64encode(b"[1, 2, 3]").decode())  # the name of no file


# The table


def test_the_table_has_each_key_once_and_names_native_keys():
    paths = [key.path for key in TABLE]
    assert len(set(paths)) == len(paths)
    native = set(dotted_keys(Config))
    native |= {key.rpartition(".")[0] for key in native}
    honoured = [key for key in TABLE if key.use is Use.HONOURED]
    assert {key.note.partition(" ")[0] for key in honoured} <= native
    assert {key.note for key in TABLE if key.use is Use.RENAMED} <= set(paths) | {"bf16"}


_JUNK = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e30,
    math.nan,
    math.inf,
    "",
    "auto",
    "X",
    [],
    [1],
    {},
    {"enabled": True},
    {"a": {}},
]


@pytest.mark.parametrize("key", TABLE, ids=lambda key: key.path)
def test_any_value_is_translated_or_a_config_error_that_names_the_key(key):
    for value in _JUNK:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Config.from_deepspeed(with_type(key, value)).resolve(2)
            except ConfigError as error:
                last = key.note if key.use is Use.RENAMED else key.path
                assert last.partition(".")[0] in str(error) or "batch sizes" in str(error)


@pytest.mark.parametrize("key", [key for key in TABLE if key.use is Use.UNAVAILABLE], ids=lambda key: key.path)
def test_what_is_not_available_says_so(key):
    message = message_of(with_type(key, {key.switches[0]: "cpu"} if key.switches else "bf16"))
    assert message.startswith(f"[config] {key.path}: got ")
    assert f"{key.note} is not available in this version. Remove it" in message
    for value in (*key.off, None):
        Config.from_deepspeed(with_type(key, value))


@pytest.mark.parametrize("key", [key for key in TABLE if key.use is Use.NO_EFFECT], ids=lambda key: key.path)
def test_what_has_no_effect_says_so_once(key):
    for value in (True, False, "cpu", 0.5, 1, "text", ["text"]):
        if value in key.off and isinstance(value, bool):
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Config.from_deepspeed(with_type(key, value))
            except ConfigError:
                continue  # another type is expected
        assert [f"{key.path}: {key.note}" in str(each.message) for each in caught] == [True]
        return
    pytest.fail("no value was accepted")


@pytest.mark.parametrize("key", [key for key in TABLE if key.auto is Auto.MUST_FILL], ids=lambda key: key.path)
def test_auto_without_a_sensible_default_is_an_error(key):
    assert f'{key.path}: got "auto", expected ' in message_of(with_type(key, "auto"))


def test_the_documentation_is_up_to_date():
    """docs/configuration.md is made by `python -m zerocore.config._document`."""
    assert (ROOT / "docs" / "configuration.md").read_text() == document()


def test_the_guide_for_deepspeed_users_has_every_key():
    """docs/migrating.md is made by `python -m zerocore.config._migrating`."""
    text = (ROOT / "docs" / "migrating.md").read_text()
    assert text == _migrating.document()
    lines = [line.split("|")[1:-1] for line in text.partition("## Every key")[2].splitlines() if line.startswith("| `")]
    assert [line[0].strip() for line in lines] == [f"`{key.path}`" for key in TABLE]
    assert {line[1].strip() for line in lines} == {"honoured", "no effect", "refused", "older name"}
    assert all(line[2].strip() for line in lines)


def test_values_that_are_no_json_are_quoted_all_the_same():
    assert "seed: got {1, 2}" in message_of({**BATCH, "seed": {1, 2}})
    assert json.dumps("x") in message_of({**BATCH, "seed": "x"})
    assert "1: got an unknown key" in message_of({**BATCH, 1: 2})

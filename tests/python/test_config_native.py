"""The native configuration: keys, checks, batch sizes."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from zerocore.config import (
    CommConfig,
    Config,
    DataConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    ResolvedConfig,
    SchedulerConfig,
    ZeroConfig,
    as_config,
)
from zerocore.config._schema import dotted_keys
from zerocore.config._sections import SCHEDULER_KEYS
from zerocore.config._types import one_of
from zerocore.errors import ConfigError, Error


def message_of(call):
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_the_keys_are_these():
    """A new key is a decision: it is added here with its reason in mind."""
    assert list(dotted_keys(Config)) == [
        "train_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "gradient_clipping",
        "steps_per_print",
        "device",
        "seed",
        "buffers",
        "optimizer.type",
        "optimizer.lr",
        "optimizer.betas",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.bias_correction",
        "optimizer.momentum",
        "optimizer.dampening",
        "optimizer.nesterov",
        "optimizer.lr_decay",
        "optimizer.initial_accumulator_value",
        "optimizer.muon_lr",
        "optimizer.muon_momentum",
        "optimizer.muon_nesterov",
        "optimizer.muon_ns_steps",
        "allow_untested_optimizer",
        "scheduler.type",
        "scheduler.warmup_num_steps",
        "scheduler.warmup_type",
        "scheduler.total_num_steps",
        "scheduler.warmup_min_lr",
        "scheduler.warmup_max_lr",
        "scheduler.warmup_min_ratio",
        "scheduler.cos_min_ratio",
        "scheduler.cycle_min_lr",
        "scheduler.cycle_max_lr",
        "scheduler.cycle_first_step_size",
        "scheduler.cycle_second_step_size",
        "scheduler.cycle_first_stair_count",
        "scheduler.cycle_second_stair_count",
        "scheduler.decay_step_size",
        "scheduler.decay_lr_rate",
        "scheduler.cycle_momentum",
        "scheduler.cycle_min_mom",
        "scheduler.cycle_max_mom",
        "scheduler.decay_mom_rate",
        "scheduler.lr_range_test_min_lr",
        "scheduler.lr_range_test_step_size",
        "scheduler.lr_range_test_step_rate",
        "scheduler.lr_range_test_staircase",
        "scheduler.torch_params",
        "scheduler.last_batch_iteration",
        "precision.dtype",
        "precision.compute_dtype",
        "precision.reduce_dtype",
        "precision.accumulate_dtype",
        "precision.loss_scale.static_scale",
        "precision.loss_scale.initial_scale_power",
        "precision.loss_scale.window",
        "precision.loss_scale.hysteresis",
        "precision.loss_scale.consecutive_hysteresis",
        "precision.loss_scale.min_scale",
        "precision.on_nonfinite",
        "zero.stage",
        "zero.bucket_numel",
        "zero.offload",
        "zero.share_parameters",
        "zero.unit_numel",
        "zero.unit_classes",
        "zero.unit_names",
        "zero.persistent_param_numel",
        "zero.persistent_total_numel",
        "zero.max_live_numel",
        "zero.max_reuse_numel",
        "zero.prefetch_numel",
        "zero.gather_16bit_weights_on_save",
        "activation_checkpointing.enabled",
        "activation_checkpointing.reentrant",
        "activation_checkpointing.cpu_checkpointing",
        "activation_checkpointing.partition_activations",
        "checkpoint.async_save",
        "checkpoint.keep_last",
        "comm.timeout_ms",
        "comm.backend",
        "comm.reduction",
        "data.shuffle",
        "data.drop_last",
        "data.num_workers",
        "wall_clock_breakdown",
        "comms_logger",
        "tensorboard.output_path",
        "tensorboard.job_name",
        "csv_monitor.output_path",
        "csv_monitor.job_name",
        "wandb.project",
        "wandb.group",
        "wandb.team",
        "flops_profiler.profile_step",
        "flops_profiler.module_depth",
        "flops_profiler.top_modules",
        "flops_profiler.detailed",
        "flops_profiler.output_file",
        "flops_profiler.recompute_fwd_factor",
    ]


def test_values_are_kept_and_counts_may_be_written_as_powers():
    config = Config(
        micro_batch_size=4,
        optimizer=OptimizerConfig(lr=1, betas=[0.9, 0.95]),
        scheduler=SchedulerConfig(type="WarmupLR", warmup_max_lr=[1e-3, 1e-4]),
        precision=PrecisionConfig(dtype="fp16", loss_scale=LossScaleConfig(static_scale=512.0), on_nonfinite="clamp"),
        zero=ZeroConfig(stage=3, bucket_numel=5e6, unit_classes=["Block"], prefetch_numel=0),
        comm=CommConfig(timeout_ms=1000),
        data=DataConfig(drop_last=True),
    )
    assert config.zero.bucket_numel == 5_000_000
    assert isinstance(config.zero.bucket_numel, int)
    assert (config.zero.unit_classes, config.zero.prefetch_numel) == (("Block",), 0)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.scheduler.warmup_max_lr == (1e-3, 1e-4)
    assert config.precision.loss_scale.static_scale == 512
    assert dataclasses.replace(config, seed=7).seed == 7


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config(micro_batch_size=1).seed = 3


def test_to_dict_is_json_and_describe_has_a_line_a_key():
    config = Config(micro_batch_size=4, optimizer=OptimizerConfig(betas=(0.9, 0.95)))
    values = config.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["optimizer"]["betas"] == [0.9, 0.95]
    lines = config.describe().splitlines()
    assert "micro_batch_size = 4" in lines
    assert "optimizer.betas = [0.9, 0.95]" in lines
    assert "scheduler = null" in lines
    other = dataclasses.replace(config, zero=ZeroConfig(stage=2)).describe().splitlines()
    assert set(lines) ^ set(other) == {"zero.stage = 0", "zero.stage = 2"}


def test_equal_configurations_are_equal_and_hash_alike():
    one, other = (Config(micro_batch_size=4, zero=ZeroConfig(stage=1)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Config(micro_batch=1), "micro_batch: got an unknown key, .* Did you mean micro_batch_size?"),
        (lambda: Config(zero_stage=1), "zero_stage: got an unknown key, .* Did you mean zero.stage?"),
        (lambda: Config(lr=1), "lr: got an unknown key, .* Did you mean optimizer.lr?"),
        (
            lambda: Config(train_micro_batch_size_per_gpu=1),
            "train_micro_batch_size_per_gpu: got an unknown key, .* Did you mean micro_batch_size?",
        ),
        (lambda: ZeroConfig(reduce_bucket_size=1), "zero.reduce_bucket_size: .* Did you mean zero.bucket_numel?"),
        (lambda: ZeroConfig(bucket_size=1), "zero.bucket_size: .* Did you mean zero.bucket_numel?"),
        (lambda: OptimizerConfig(wieght_decay=1), "optimizer.wieght_decay: .* Did you mean optimizer.weight_decay?"),
        (
            lambda: LossScaleConfig(hysterisis=1),
            "precision.loss_scale.hysterisis: .* Did you mean precision.loss_scale.hysteresis?",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(build, text):
    assert re.fullmatch(r"\[config\] " + text.replace("?", r"\?") + " Rename or remove it.", message_of(build))


def test_a_key_like_no_other_gets_no_suggestion():
    assert "Did you mean" not in message_of(lambda: Config(qqq=1))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Config(micro_batch_size=0), "micro_batch_size: got 0, expected an integer >= 1 or None."),
        (lambda: Config(micro_batch_size=1.5), "micro_batch_size: got 1.5, expected an integer >= 1 or None."),
        (lambda: Config(micro_batch_size=True), "micro_batch_size: got True, expected an integer >= 1 or None."),
        (lambda: Config(train_batch_size="8"), "train_batch_size: got '8', expected an integer >= 1 or None."),
        (lambda: Config(gradient_clipping=-1), "gradient_clipping: got -1, expected a number >= 0."),
        (lambda: Config(gradient_clipping=float("nan")), "gradient_clipping: got nan, expected a number >= 0."),
        (lambda: Config(seed=-1), "seed: got -1, expected an integer from 0 to 2^63 - 1."),
        (lambda: Config(zero={"stage": 1}), "zero: got {'stage': 1}, expected a ZeroConfig."),
        (lambda: Config(zero=None), "zero: got None, expected a ZeroConfig."),
        (lambda: ZeroConfig(stage=4), "zero.stage: got 4, expected 0, 1, 2 or 3."),
        (lambda: ZeroConfig(stage=-1), "zero.stage: got -1, expected 0, 1, 2 or 3."),
        (lambda: ZeroConfig(unit_numel=-1), "zero.unit_numel: got -1, expected an integer >= 0."),
        (lambda: ZeroConfig(unit_classes="Block"), "zero.unit_classes: got 'Block', expected a list of strings."),
        (lambda: ZeroConfig(unit_names=[1]), "zero.unit_names: got [1], expected a list of strings."),
        (lambda: ZeroConfig(max_live_numel=0), "zero.max_live_numel: got 0, expected an integer >= 1."),
        (lambda: ZeroConfig(bucket_numel=-1), "zero.bucket_numel: got -1, expected an integer >= 1."),
        (lambda: ZeroConfig(bucket_numel=1e30), "zero.bucket_numel: got 1e+30, expected an integer >= 1."),
        (lambda: CommConfig(timeout_ms=0), "comm.timeout_ms: got 0, expected an integer >= 1."),
        (lambda: DataConfig(shuffle=1), "data.shuffle: got 1, expected true or false."),
        (
            lambda: OptimizerConfig(type="lamb"),
            'optimizer.type: got \'lamb\', expected "adamw", "adam", "sgd", "lion", "adagrad" or "muon".',
        ),
        (
            lambda: OptimizerConfig(type="lion", eps=1.0),
            'optimizer.eps: got 1.0, expected no value: type "lion" has none. Remove it.',
        ),
        (
            lambda: OptimizerConfig(betas=(0.9, 1.0)),
            "optimizer.betas: got (0.9, 1.0), expected two numbers, each >= 0 and < 1.",
        ),
        (
            lambda: OptimizerConfig(momentum=0.9),
            'optimizer.momentum: got 0.9, expected no value: type "adamw" has none. Remove it.',
        ),
        (
            lambda: OptimizerConfig(type="sgd", betas=(0.5, 0.5)),
            'optimizer.betas: got (0.5, 0.5), expected no value: type "sgd" has none. Remove it.',
        ),
        (
            lambda: OptimizerConfig(type="sgd", nesterov=True),
            "optimizer.nesterov: got momentum 0.0 and dampening 0.0, expected momentum > 0 and dampening 0 with "
            "Nesterov "
            "momentum. Change them, or set nesterov=False.",
        ),
        (
            lambda: SchedulerConfig(),
            f"scheduler.type: got nothing, expected {one_of(SCHEDULER_KEYS)}. Set it.",
        ),
        (
            lambda: SchedulerConfig(type="WarmupDecayLR"),
            "scheduler.total_num_steps: got None, expected the number of steps of the run. WarmupDecayLR needs it.",
        ),
        (
            lambda: SchedulerConfig(type="WarmupLR", total_num_steps=5),
            'scheduler.total_num_steps: got 5, expected no value: type "WarmupLR" has none. Remove it.',
        ),
        (
            lambda: SchedulerConfig(type="WarmupCosineLR", total_num_steps=5, warmup_max_lr=1.0),
            'scheduler.warmup_max_lr: got 1.0, expected no value: type "WarmupCosineLR" has none. Remove it.',
        ),
        (
            lambda: SchedulerConfig(type="WarmupLR", warmup_max_lr=[0.1, -0.1]),
            "scheduler.warmup_max_lr: got [0.1, -0.1], expected a number >= 0 or one such number a parameter group or "
            "None.",
        ),
        (
            lambda: PrecisionConfig(dtype="fp8"),
            'precision.dtype: got \'fp8\', expected "fp32", "bf16" or "fp16".',
        ),
        (
            lambda: PrecisionConfig(compute_dtype="float16"),
            'precision.compute_dtype: got \'float16\', expected "fp32", "bf16" or "fp16" or None.',
        ),
        (
            lambda: PrecisionConfig(accumulate_dtype=None),
            'precision.accumulate_dtype: got None, expected "fp32", "bf16" or "fp16".',
        ),
        (
            lambda: PrecisionConfig(on_nonfinite="ignore"),
            'precision.on_nonfinite: got \'ignore\', expected "skip", "clamp" or "raise" or None.',
        ),
        (
            lambda: LossScaleConfig(initial_scale_power=2, min_scale=8.0),
            "precision.loss_scale.min_scale: got 8.0, expected at most the initial scale 2^2. Lower min_scale or raise "
            "initial_scale_power.",
        ),
        (lambda: Config(3), "Config: got 3 by position, expected keys. Name the key."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(build, text):
    assert message_of(build) == f"[config] {text}"


def test_all_problems_are_reported_at_once():
    message = message_of(lambda: Config(micro_batch_size=0, seed="x", stage=1))
    assert message.splitlines()[0] == "[config] 3 problems in this configuration:"
    assert [line.split(":")[0].strip(" -") for line in message.splitlines()[1:]] == [
        "micro_batch_size",
        "seed",
        "stage",
    ]


def test_config_error_is_a_value_error_and_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, Error)


@pytest.mark.parametrize(
    ("given", "num_ranks", "expected"),
    [  # train_batch_size, micro_batch_size, accumulation -> the same and the number of micro-batches
        ((32, 4, None), 2, (32, 4, 4, 8)),
        ((32, None, 4), 2, (32, 4, 4, 8)),
        ((None, 4, 4), 2, (32, 4, 4, 8)),
        ((32, 4, 4), 2, (32, 4, 4, 8)),
        ((32, None, None), 2, (32, 16, 1, 2)),
        ((None, 4, None), 3, (12, 4, 1, 3)),
        ((8, 1, None), 3, (8, 1, 3, 8)),
        ((4, 4, None), 3, (4, 4, 1, 1)),
    ],
)
def test_resolve_completes_the_batch_sizes(given, num_ranks, expected):
    total, micro, accumulation = given
    config = Config(train_batch_size=total, micro_batch_size=micro, gradient_accumulation_steps=accumulation, seed=5)
    resolved = config.resolve(num_ranks)
    assert isinstance(resolved, ResolvedConfig)
    assert (
        resolved.train_batch_size,
        resolved.micro_batch_size,
        resolved.gradient_accumulation_steps,
        resolved.micro_batches,
    ) == expected
    assert (resolved.world_size, resolved.seed) == (num_ranks, 5)


@pytest.mark.parametrize("num_ranks", range(1, 6))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_uneven_micro_batches_fit_into_the_fewest_micro_steps(num_ranks, micro_batches):
    resolved = Config(train_batch_size=3 * micro_batches, micro_batch_size=3).resolve(num_ranks)
    slots = resolved.gradient_accumulation_steps * num_ranks
    assert resolved.micro_batches == micro_batches
    assert micro_batches <= slots < micro_batches + num_ranks


@pytest.mark.parametrize(
    ("given", "num_ranks", "text"),
    [
        (
            (32, 4, 3),
            2,
            "batch sizes: got train_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=3 on 2 ranks, "
            "expected "
            "train_batch_size = micro_batch_size * gradient_accumulation_steps * ranks, which is 4 * 3 * 2 = 24. One "
            "of "
            "these fits: train_batch_size=24; gradient_accumulation_steps=4; no gradient_accumulation_steps.",
        ),
        (
            (10, 4, None),
            1,
            "train_batch_size: got 10 with micro_batch_size=4, expected a multiple of micro_batch_size. Set it to 8 "
            "or 12, "
            "or micro_batch_size to a divisor of 10 (1, 2).",
        ),
        (
            (10, None, 2),
            4,
            "train_batch_size: got 10 with gradient_accumulation_steps=2 on 4 ranks, expected a multiple of 2 * 4 = "
            "8. Set "
            "it to 8 or 16; or set micro_batch_size to a divisor of it and leave gradient_accumulation_steps out: "
            "ranks may "
            "then have unequal numbers of micro-batches.",
        ),
        (
            (None, None, 2),
            1,
            "batch sizes: got only gradient_accumulation_steps=2, expected train_batch_size or micro_batch_size. Set "
            "micro_batch_size (train_micro_batch_size_per_gpu in a DeepSpeed configuration) to the samples a rank "
            "processes "
            "at once.",
        ),
        ((8, 1, None), 0, "world_size: got 0, expected a number of ranks >= 1."),
        ((8, 1, None), True, "world_size: got True, expected a number of ranks >= 1."),
    ],
)
def test_batch_sizes_that_do_not_fit_say_what_would(given, num_ranks, text):
    total, micro, accumulation = given
    config = Config(train_batch_size=total, micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    assert message_of(lambda: config.resolve(num_ranks)) == f"[config] {text}"


def test_none_given_says_what_to_set():
    assert "got no batch size, expected train_batch_size or micro_batch_size" in message_of(lambda: Config().resolve(1))


def test_a_resolved_configuration_is_for_one_number_of_ranks():
    resolved = Config(train_batch_size=8, micro_batch_size=1).resolve(3)
    assert resolved.resolve(3) is resolved
    assert message_of(lambda: resolved.resolve(2)).startswith("[config] world_size: got 2, expected 3, for which")


def test_as_config_takes_what_users_hand_over(tmp_path):
    config = Config(micro_batch_size=2)
    assert as_config(config) is config
    assert as_config({"train_micro_batch_size_per_gpu": 2}).micro_batch_size == 2
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2}')
    assert as_config(path) == as_config(str(path)) == as_config({"train_micro_batch_size_per_gpu": 2})
    assert message_of(lambda: as_config(3)) == "[config] config: got int, expected a zerocore.Config, a dict or a path."


def test_importing_the_configuration_does_not_import_torch():
    code = "import sys, zerocore.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

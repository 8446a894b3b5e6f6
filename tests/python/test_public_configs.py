"""DeepSpeed configurations as people publish them: accepted, or a ConfigError that names key and reason.

public_configs.txt holds facts about configurations of public repositories: key, value, and the numbers of the sampled
configurations that have it (none: seen elsewhere).
"""

from __future__ import annotations

import collections
import json
import random
import re
import string
import time
import warnings
from pathlib import Path

import pytest
from zerocore.config import Config
from zerocore.config._table import TABLE
from zerocore.errors import ConfigError

# What Hugging Face's Trainer writes over "auto", for a model of width 768.
TRAINER = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 100,
    "scheduler.params.total_num_steps": 1000,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": 768 * 768,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 768 * 768),
    "zero_optimization.stage3_param_persistence_threshold": 10 * 768,
}

# The configurations that are refused once "auto" is filled, with the keys that say why.
REFUSED = {
    23: {"compression_training"},
    32: {"scheduler.params.warmup_type"},  # "cosine", which DeepSpeed takes for "log"
    45: {"amp", "optimizer.eps", "optimizer.weight_decay"},
    67: {"data_efficiency", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu"}
    | {"prescale_gradients", "zero_optimization.stage"},  # a template: "X" stands for a number
    71: {"comms_config", "monitor_config"},
    75: {"fp16.auto_cast", "fp16.enabled"},  # "true"
    80: {"pipeline"},
    103: {"data_efficiency"},
    105: {"quantize_training"},
    109: {"scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"},  # of WarmupCosineLR
    120: {"pipeline", "tensor_parallel"},
    127: {"elasticity"},
    132: {"save_interval", "steps_per_print"},
    140: {"monitor_config"},
}


def facts():
    for line in (Path(__file__).parent / "public_configs.txt").read_text().splitlines():
        path, value, *numbers = line.split("\t")
        yield path, json.loads(value), [int(number) for number in " ".join(numbers).split()]


def nested(values):
    config = {}
    for path, value in values.items():
        *blocks, name = path.split(".")
        inner = config
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = value
    return config


def flat_configs():
    configs = collections.defaultdict(dict)
    for path, value, numbers in facts():
        for number in numbers:
            configs[number][path] = value
    return dict(sorted(configs.items()))


def filled(flat):
    """As Trainer fills it in; Trainer leaves the "auto" that it does not know."""
    batch = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    new = {path: TRAINER.get(path, value) if value == "auto" else value for path, value in flat.items()}
    if not batch & set(new) - {"gradient_accumulation_steps"}:
        new["train_micro_batch_size_per_gpu"] = TRAINER["train_micro_batch_size_per_gpu"]
    if new.get("train_batch_size") == "auto":
        new["train_batch_size"] = TRAINER["train_micro_batch_size_per_gpu"] * new["gradient_accumulation_steps"]
    if flat.get("bf16.enabled") == "auto" and new.get("fp16.enabled") in (True, "true"):
        new["bf16.enabled"] = False
    return new


def refusal(config):
    """The message, with anything but a ConfigError as the test's failure; None where it is accepted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Config.from_deepspeed(config)
        except ConfigError as error:
            return str(error)
    return None


def named_keys(message):
    """The keys of a ConfigError's problems: each names one, with what was found and what is expected."""
    problems = re.sub(r"^\[config\] (\d+ problems in this configuration:)?", "", message).split("\n  - ")
    found = set()
    for problem in filter(None, (problem.strip() for problem in problems)):
        match = re.fullmatch(r"([\w. ]+): got .+, expected .+\.", problem, re.DOTALL)
        assert match, problem
        found |= set(match[1].split(" and "))
    return found


@pytest.mark.parametrize(("number", "flat"), flat_configs().items())
def test_each_is_accepted_or_told_why_not(number, flat):
    message = refusal(nested(filled(flat)))
    assert (set() if message is None else named_keys(message)) == REFUSED.get(number, set())
    message = refusal(nested(flat))
    if message is not None:  # what nobody has filled is named too
        autos = {path for path, value in flat.items() if value == "auto"}
        assert named_keys(message) <= REFUSED.get(number, set()) | autos


def test_seven_in_ten_are_accepted():
    configs = flat_configs()
    assert len(configs) == 50
    accepted = [number for number, flat in configs.items() if refusal(nested(filled(flat))) is None]
    assert len(accepted) / len(configs) >= 0.7


def test_what_comes_later_says_so():
    configs = flat_configs()
    for number in (23, 80, 120, 127):  # compression, pipelines, elasticity
        assert "not available in this version" in refusal(nested(filled(configs[number])))


def test_each_value_that_was_seen_is_accepted_or_told_why_not():
    for path, value, _ in facts():
        config = nested({"train_micro_batch_size_per_gpu": 1, path: value})
        for section, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
            if isinstance(config.get(section), dict):
                config[section].setdefault("type", kind)
        message = refusal(config)
        top = path.partition(".")[0]
        assert message is None or any(key.startswith(top) for key in named_keys(message)), (path, value, message)


# Values that nobody writes


def any_value(rng, depth=0):
    kinds = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, 1, -1, 2, 3, 7, 10**9, 2**62 + 1, 2**63, -(2**70), 10**400, 10**5000]),
        lambda: rng.choice([0.0, -0.0, 0.5, 1e-300, 5e8, 1e308, float("inf"), float("-inf"), float("nan")]),
        lambda: rng.choice(["", "auto", "none", "cpu", "true", "0", "1e5", "fp16", "\ud800", "\0", "é" * 90]),
        lambda: "".join(rng.choices(string.printable, k=rng.randrange(2000))),
        lambda: [any_value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {any_name(rng): any_value(rng, depth + 1) for _ in range(rng.randrange(4))},
        lambda: deep(rng),
    ]
    return rng.choice(kinds[:6] if depth > 3 else kinds)()


def any_name(rng):
    known = rng.choice(TABLE).path.split(".")
    return rng.choice([rng.choice(known), "enabled", "device", "type", "params", "", " ", "x" * 5000, "é", "_", "a.b"])


def deep(rng):
    value = rng.choice([{}, [], 1])
    for _ in range(rng.choice([10, 10, 3000])):
        value = rng.choice([{"enabled": value}, [value]])
    return value


def set_at(config, path, value):
    """Sets a key, in blocks that are made where there are none."""
    *blocks, name = path.split(".")
    for block in blocks:
        inner = config.get(block)
        if not isinstance(inner, dict):
            inner = config[block] = {}
        config = inner
    config[name] = value


def test_any_value_at_any_key_is_accepted_or_a_config_error():
    """Never another exception, and never a wait: the whole config is read again with each."""
    rng = random.Random(1)
    configs = [nested(filled(flat)) for flat in flat_configs().values()]
    paths = [path for path, _, _ in facts()] + [key.path for key in TABLE]
    for count in range(1000):
        config = json.loads(json.dumps(rng.choice(configs)))
        for _ in range(rng.randrange(1, 4)):
            path = rng.choice(paths) if rng.random() < 0.9 else any_name(rng)
            set_at(config, path, any_value(rng))
        begin = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                Config.from_deepspeed(config).resolve(rng.choice([1, 3, 64]))
            except ConfigError as error:
                assert str(error).startswith("[config] ")
        assert time.monotonic() - begin < 5, f"case {count}: {config}"


def test_any_text_is_accepted_or_a_config_error(tmp_path):
    rng = random.Random(2)
    configs = [json.dumps(nested(flat), indent=1) for flat in flat_configs().values()]
    path = tmp_path / "ds.json"
    pieces = ['"', "{", "}", "[", "]", ",", ":", "\n", "//", "#", "/*", "True", "'", "1" * 5000, "[" * 5000, "\0", "\\"]
    for _ in range(200):
        text = rng.choice(configs)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([*pieces, ""]) + text[at + rng.randrange(3) :]
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        refusal(path)
        refusal(text)

"""Writes docs/configuration.md from the dataclasses and the DeepSpeed table: `python -m zerocore.config._document`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator

from zerocore.config import _build
from zerocore.config._keys import Auto, Key, Use
from zerocore.config._native import Config
from zerocore.config._schema import nested_class
from zerocore.config._table import TABLE
from zerocore.config._types import expected, one_of

_INTRODUCTION = """\
# Configuration

*Made by `python -m zerocore.config._document`; change it there.*

`Engine(model, config)` takes a `zerocore.Config`, or a DeepSpeed configuration as a dict or as the path of a JSON file.

```python
from zerocore import Config, Engine
from zerocore.config import OptimizerConfig, PrecisionConfig, ZeroConfig

config = Config(
    micro_batch_size=4,
    train_batch_size=32,
    optimizer=OptimizerConfig(type="adamw", lr=3e-4, weight_decay=0.1),
    precision=PrecisionConfig(dtype="bf16"),
    zero=ZeroConfig(stage=2),
    gradient_clipping=1.0,
)
engine = Engine(model, config)
```

A wrong key or value is a `ConfigError` that says what was found, what is expected and, for an unknown key, the nearest
one. `Config.describe()` prints a configuration, one line a key; a changed copy is made by `dataclasses.replace`.
"""

_BATCH_SIZES = """\
## Batch sizes

A step trains on `train_batch_size` samples: M = `train_batch_size` / `micro_batch_size` micro-batches, dealt in turn to
N ranks, so that a rank goes through `gradient_accumulation_steps` = ceil(M / N) of them. `Config.resolve(world_size)`
completes the three:

| given | becomes |
| --- | --- |
| `train_batch_size`, `micro_batch_size` | accumulation ceil(M / N); if N does not divide M, some ranks have one less |
| `train_batch_size`, `gradient_accumulation_steps` | a micro-batch of step / (accumulation * N) |
| `micro_batch_size`, `gradient_accumulation_steps` | a step of micro-batch * accumulation * N |
| `train_batch_size` | accumulation 1, a micro-batch of step / N |
| `micro_batch_size` | accumulation 1, a step of micro-batch * N |
| all three | step = micro-batch * accumulation * N must hold |
| only `gradient_accumulation_steps`, or none | an error |

Whatever does not divide is an error that names sizes which would fit. The same data, and so the same result, on any
number of ranks takes `train_batch_size` and `micro_batch_size`.
"""

_DEEPSPEED = f"""\
## DeepSpeed configurations

`Config.from_deepspeed(source)` translates a dict, a JSON file, or JSON as base64 (as DeepSpeed's launcher passes it
on); `Engine` and `initialize` do so for whatever is not a `Config`. JSON is strict: a comment or a trailing comma is an
error that names its line, a key given twice one that names the key. Names with a leading underscore are taken for
comments. Whole numbers may be written `5e8`. All problems are reported in one `ConfigError`; remarks are
`zerocore.config.ConfigWarning`s, one a kind.

Defaults on this path are DeepSpeed's where they differ from those above:

- `gradient_clipping` is {_build.GRADIENT_CLIPPING}; 0 switches it off.
- A schedule of torch has torch's defaults; what `scheduler.params` holds is handed to it.
- Optimizer "Adagrad" has `lr` {_build.ADAGRAD["lr"]} and `eps` {_build.ADAGRAD["eps"]}.
- Optimizer "Muon" has `muon_lr` {_build.MUON["muon_lr"]}, and for AdamW's part `adam_lr` {_build.MUON["lr"]},
  `betas` {_build.MUON["betas"]} and `eps` {_build.MUON["eps"]}.
- Optimizer "Adam" decouples weight decay, as AdamW does, unless `adam_w_mode` is false.
- `torch_adam` with decoupled weight decay makes `weight_decay` {_build.TORCH_ADAMW_WEIGHT_DECAY} unless it is given.
- `warmup_max_lr` is {_build.WARMUP_DECAY_MAX_LR} for WarmupDecayLR; for WarmupLR it is the optimizer's learning rate.

"auto" stands for a value that another program fills in. None does here, so it counts as "not given", with a warning;
where there is no sensible default it is an error, as marked below. `zero_optimization: true` is stage 1, `false` is
stage 0.
"""


def document() -> str:
    """The text of docs/configuration.md."""
    tables = "\n\n".join("\n".join(_native_table(cls, prefix)) for cls, prefix in _classes(Config, ""))
    parts = [_INTRODUCTION, f"## Native keys\n\n{tables}\n", _BATCH_SIZES, _DEEPSPEED]
    parts += ["\n".join(lines) + "\n" for lines in (_honoured(), _no_effect(), _unavailable(), _renamed())]
    return "\n".join(parts)


def _classes(cls: type, prefix: str) -> Iterator[tuple[type, str]]:
    yield cls, prefix
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        if nested := nested_class(hints[each.name]):
            yield from _classes(nested, f"{prefix}{each.name}.")


def _native_table(cls: type, prefix: str) -> Iterator[str]:
    documentation = _key_documentation(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    summary = (inspect.getdoc(cls) or "").splitlines()[0]
    yield f"### `{cls.__name__}`{f', `{prefix[:-1]}`' if prefix else ''}\n\n{summary}\n"
    yield "| key | default | value | meaning |\n| --- | --- | --- | --- |"
    for each in dataclasses.fields(cls):
        value = "" if nested_class(hints[each.name]) else expected(hints[each.name])
        yield f"| `{prefix}{each.name}` | {_default(each)} | {value} | {documentation[each.name]} |"


def _default(each: dataclasses.Field[object]) -> str:
    if each.default_factory is not dataclasses.MISSING:
        return f"`{each.default_factory.__name__}()`"  # type: ignore[attr-defined]
    return "must be set" if each.default is dataclasses.MISSING else f"`{each.default!r}`"


def _key_documentation(cls: type) -> dict[str, str]:
    """The strings that stand below the keys of a class, by key."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    documentation = {}
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), (
                f"{line.target.id} says nothing"
            )
            documentation[line.target.id] = str(below.value.value)
    return documentation


def _of(use: Use) -> list[Key]:
    return [key for key in TABLE if key.use is use]


def _honoured() -> Iterator[str]:
    yield '### Honoured\n\n| key | value | native key | "auto" |\n| --- | --- | --- | --- |'
    types = {"optimizer.type": _build.OPTIMIZERS, "scheduler.type": _build.SCHEDULERS}
    names = _build.OPTIMIZERS | _build.SCHEDULERS
    for key in _of(Use.HONOURED):
        value = one_of(types[key.path].values()) if key.path in types else expected(key.type)
        only = f" ({', '.join(names[each] for each in key.only)})" if key.only else ""
        native, _, remark = key.note.partition(" ")
        auto = "an error" if key.auto is Auto.MUST_FILL else "not given"
        yield f"| `{key.path}`{only} | {value.replace('None', 'null')} | {f'`{native}` {remark}'.strip()} | {auto} |"
    yield '\nBatch sizes may be "auto" as long as one of the first two is a number.'


def _no_effect() -> Iterator[str]:
    yield (
        "### Accepted without effect\n\nWith one warning that lists them; without it where the value asks for "
        "nothing.\n\n"
        "| key | no warning for | why |\n| --- | --- | --- |"
    )
    for key in _of(Use.NO_EFFECT):
        yield f"| `{key.path}` | {_values(key.off)} | {key.note} |"


def _unavailable() -> Iterator[str]:
    yield (
        "### Not available in this version\n\n"
        "An error, unless the value asks for nothing.\n\n"
        "| key | accepted for | what is missing |\n| --- | --- | --- |"
    )
    for key in _of(Use.UNAVAILABLE):
        switches = ", ".join(f"no `{name}`" for name in key.switches)
        yield f"| `{key.path}` | {switches or _values(key.off)} | {key.note} |"


def _renamed() -> Iterator[str]:
    yield "### Older names\n\nRead with one warning.\n\n| key | new name |\n| --- | --- |"
    for key in _of(Use.RENAMED):
        yield f"| `{key.path}` | `{key.note}` |"


def _values(off: tuple[object, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in off)


if __name__ == "__main__":
    print(document(), end="")

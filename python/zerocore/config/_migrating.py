"""Writes docs/migrating.md, with a line for every DeepSpeed key: `python -m zerocore.config._migrating`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from zerocore.config._keys import Key, Use
from zerocore.config._table import TABLE

_INTRODUCTION = """\
# Coming from DeepSpeed

*Made by `python -m zerocore.config._migrating`; change it there.*

A script that trains with DeepSpeed changes in two lines, its configuration in none:

```python
import zerocore as deepspeed

engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)
for batch in loader:
    loss = engine(batch.to(engine.device))
    engine.backward(loss)
    engine.step()
```

| DeepSpeed | zerocore |
| --- | --- |
| `import deepspeed` | `import zerocore as deepspeed` |
| `.to(engine.local_rank)`, `.cuda()` | `.to(engine.device)`: on a CPU an integer names no device |
| `loss / gradient_accumulation_steps` | leave it out: `step()` divides the sum once, exactly |
| `deepspeed --num_gpus=4 train.py` | `zerocore --num_gpus=4 train.py` or `mpirun` ([launching](launching.md)) |
| a hostfile, `MASTER_ADDR`, `RANK` | the hosts of `mpirun` or `srun --mpi=pmix`: ranks meet through MPI |
| `engine.save_checkpoint(dir)`, `load_checkpoint(dir)` | the same; they load in any stage, on any ranks |
| a checkpoint of DeepSpeed's | `zerocore import-deepspeed ds_run run`, then load it ([checkpoints](checkpoints.md)) |
| `zero_to_fp32.py` | `zerocore export run out`; its functions are in `zerocore.utils` |
| `ds_to_universal.py` | nothing: every checkpoint is universal |
| `ds_report` | `zerocore report` |
| `estimate_zero3_model_states_mem_needs_all_live` | the same, in `zerocore.utils`; of a config, `zerocore plan` |
| `init_inference`, `PipelineModule`, `deepspeed.moe` | not in this version |

What is different on purpose:

- **A key that nothing reads is an error**, with the nearest one that there is. DeepSpeed drops a misspelt key at the
  top level in silence, and trains with the default.
- **"auto" is filled in by Hugging Face's Trainer and by Accelerate, or by nobody.** Where nobody did, a key with a
  sensible default takes it, with a warning; one without (a learning rate, the number of steps) is an error.
- **JSON is strict.** DeepSpeed's reader takes comments and trailing commas; here they are errors that name the line.
- **Gradients are summed in fp32, in a fixed order, and divided once**, so the result does not depend on the stage or
  the number of ranks, and prescaling has nothing to do.

`Config.from_deepspeed("ds_config.json").describe()` prints what a configuration becomes. `docs/configuration.md` has
the native keys, and which values each key takes.

## Every key

*honoured*: it sets something. *no effect*: accepted, with one warning that lists such keys. *refused*: a `ConfigError`,
unless the value asks for nothing. *older name*: read with a warning.

| DeepSpeed key | class | what zerocore does |
| --- | --- | --- |
"""

_CLASSES = {
    Use.HONOURED: "honoured",
    Use.NO_EFFECT: "no effect",
    Use.UNAVAILABLE: "refused",
    Use.RENAMED: "older name",
}


def document() -> str:
    """The text of docs/migrating.md."""
    return _INTRODUCTION + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    for key in TABLE:
        yield f"| `{key.path}` | {_CLASSES[key.use]} | {_what(key)} |"


def _what(key: Key) -> str:
    if key.use is Use.HONOURED:
        native, _, remark = key.note.partition(" ")
        return f"sets `{native}` {remark}".strip()
    if key.use is Use.NO_EFFECT:
        return key.note
    if key.use is Use.RENAMED:
        return f"reads it as `{key.note}`"
    off = [f"without `{name}`" for name in key.switches] or [f"`{json.dumps(value)}`" for value in key.off]
    return f"{key.note}: not in this version" + (f"; accepted: {', '.join(off)}" if off else "")


if __name__ == "__main__":
    print(document(), end="")

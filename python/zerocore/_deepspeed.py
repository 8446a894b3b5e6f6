"""DeepSpeed's checkpoints of ZeRO stages 1, 2 and 3: where each parameter's elements lie.

Note: the layouts, as of DeepSpeed 0.9 to 0.19. A folder holds `zero_pp_rank_<rank>_mp_rank_00_optim_states.pt` of each
rank, with `bf16_` before it or not: flat fp32 masters, and the state of torch's optimizer over them. And it holds model
states, in stage 3 of each rank, else of one; `param_shapes` in them names the parameters in the order in which they lie
in the flat tensors.

Stages 1 and 2: a parameter group is one flat tensor, each parameter followed by its padding (where there are
`param_alignment_paddings`), cut into equal partitions, one a rank. It is padded at the end to a multiple of 2 * ranks;
of the masters, not of the optimizer's states, that padding is left out.

Stage 3: each parameter by itself is cut into equal partitions, the last one padded. A rank's partitions follow each
other in flat tensors of sub-groups, of which a parameter group has one or more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerocore import _foreign_pickle
from zerocore._foreign_pickle import StandIn
from zerocore.errors import CheckpointError, UnsupportedError

_OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
MASTER = "master"
_OWN_KEYS = {  # in the model states, beside the user's
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
    *("num_experts", "ds_autoep_layers", "autoep_layers"),
}


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [begin, end) of a parameter: those from `offset` on in flat tensor number `flat` of a rank."""

    rank: int
    flat: int
    offset: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained parameter; group: its parameter group."""

    name: str
    shape: tuple[int, ...]
    group: int
    fragments: list[Fragment]


class DeepSpeedCheckpoint:
    """A checkpoint of DeepSpeed's, its files mapped.

    Args:
        path: its folder, which DeepSpeed calls by the tag; or the one above, with `latest`.

    Raises:
        CheckpointError: it is damaged, or is none.
        UnsupportedError: stage 0, model or pipeline parallelism, experts.
    """

    def __init__(self, path: Path) -> None:
        self.path = _folder(path)
        optim_files, model_files = _files(self.path)
        self.world_size = len(optim_files)
        self.models = [_as_dict(_foreign_pickle.load(file), file) for file in model_files]
        self.model = self.models[0]
        loaded = [_as_dict(_foreign_pickle.load(file), file) for file in optim_files]
        self.optims = [
            _as_dict(each.get("optimizer_state_dict"), file) for each, file in zip(loaded, optim_files, strict=True)
        ]
        self.optim = self.optims[0]
        self.stage = self._find_stage()
        if self.stage == 3 and len(model_files) != self.world_size:
            raise self._damaged(f"got model states of {len(model_files)} ranks, expected {self.world_size}")
        counts = self.optim.get("partition_count")
        count = max(counts) if isinstance(counts, list) and counts else counts
        if count not in (None, self.world_size):
            raise self._damaged(f"got optimizer states of {self.world_size} ranks, expected {count}")
        self.config: dict[str, Any] = self.model["ds_config"] if isinstance(self.model.get("ds_config"), dict) else {}
        self.values: Mapping[str, Any] = _as_dict(self.model.get("module"), self.path)
        self.buffers = [name for name in self.model.get("buffer_names") or [] if name in self.values]
        try:
            self._flats = self._find_flats()
            self.trained = list(self._stage3() if self.stage == 3 else self._stage12())
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its layout is not known ({type(error).__name__}: {error})") from None

    @property
    def version(self) -> str:
        return str(self.model.get("ds_version", "?"))

    def number(self, key: str) -> int:
        """A counter of the model states."""
        value = self.model.get(key, 0)
        return value if type(value) is int and 0 <= value < 2**62 else 0

    def client_state(self) -> dict[str, Any]:
        return {key: value for key, value in self.model.items() if key not in _OWN_KEYS}

    def ties(self) -> dict[str, str]:
        """Names that stand for a tensor which has another one, and that one."""
        shared = self.model.get("shared_params")
        return dict(shared) if isinstance(shared, dict) else {}

    def parts(self) -> list[str]:
        """What there is of each trained parameter: the master, and the optimizer's states."""
        return [MASTER, *(name for name in _STATES if name in self._flats)]

    def read(self, part: str, fragment: Fragment) -> torch.Tensor:
        """A fragment's elements, in fp32; mapped where the file holds fp32."""
        flat = self._flats[part][fragment.rank][fragment.flat]
        return flat[fragment.offset : fragment.offset + fragment.end - fragment.begin].float()

    def frozen(self, name: str) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """The shape of a parameter that is not trained, and its elements in pieces; None where it was left out."""
        if self.stage < 3:
            value = self.values[name]
            return (tuple(value.shape), [value.detach().reshape(-1)]) if isinstance(value, torch.Tensor) else None
        shapes = self.model.get("frozen_param_shapes") or {}
        if name not in shapes:
            return None
        shape = tuple(shapes[name])
        left = math.prod(shape)
        pieces = []
        for model in self.models:
            piece = model["frozen_param_fragments"][name].detach().reshape(-1)[:left]
            left -= piece.numel()
            pieces.append(piece)
        if left:
            raise self._damaged(f"{name} lacks {left} elements")
        return shape, pieces

    def steps(self) -> dict[int, int]:
        """Updates made to the parameters of each flat tensor."""
        applied = max(0, self.number("global_steps") - self.number("skipped_steps"))
        steps = {}
        for flat, state in self._states(self.optim).items():
            found = [state.get("step"), self._group_of(flat).get("step"), self.optim.get("base_optimizer_state_step")]
            step = next((each for each in found if each is not None), applied)
            steps[flat] = int(step)
        return steps

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, as torch's optimizer saved them."""
        base = self._base(self.optim)
        groups = base.get("param_groups") if isinstance(base, dict) else None
        return [group for group in groups or [] if isinstance(group, dict)]

    def loss_scaler(self) -> tuple[float, int, int, int] | None:
        """(scale, iteration, last overflow, overflows left until the scale halves) of a dynamic one."""
        scaler = self.optim.get("loss_scaler")
        if not isinstance(scaler, StandIn) or not scaler.state.get("dynamic"):
            return None
        state = scaler.state
        numbers = (state[key] for key in ("cur_iter", "last_overflow_iter", "cur_hysteresis"))
        iteration, last_overflow, left = map(int, numbers)
        return float(state["cur_scale"]), iteration, last_overflow, left

    # Layouts

    def _find_stage(self) -> int:
        stage = self.optim.get("zero_stage", 1)  # BF16_Optimizer, which is stage 1, does not say
        if isinstance(stage, StandIn) and stage.arguments:
            stage = stage.arguments[0]
        if stage not in (1, 2, 3):
            raise UnsupportedError(f"[import] {self.path}: got ZeRO stage {stage}, expected 1, 2 or 3.")
        return int(stage)

    def _base(self, optim: Mapping[str, Any]) -> Any:
        return optim.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")

    def _states(self, optim: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The state of torch's optimizer for each flat tensor."""
        base = self._base(optim)
        if isinstance(base, list):  # of elastic_checkpoint
            return dict(enumerate(base))
        return dict(base.get("state", {})) if isinstance(base, dict) else {}

    def _find_flats(self) -> dict[str, list[list[torch.Tensor]]]:
        """Part -> rank -> flat tensors."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        masters = [[flat.detach() for flat in optim[key]] for optim in self.optims]
        found = {MASTER: masters}
        for name in _STATES:
            states = [self._states(optim) for optim in self.optims]
            if all(
                isinstance(state.get(i, {}).get(name), torch.Tensor) for state in states for i in range(len(masters[0]))
            ):
                found[name] = [
                    [state[i][name].detach().reshape(-1) for i in range(len(masters[0]))] for state in states
                ]
        return found

    def _stage12(self) -> Iterator[Trained]:
        align = 2 * self.world_size
        all_paddings = self.optim.get("param_alignment_paddings")
        for group, shapes in enumerate(self.model["param_shapes"]):
            lengths = [flats[rank][group].numel() for flats in self._flats.values() for rank in range(self.world_size)]
            partition = max(lengths)  # all are as long, but for padding that was left out
            held = sum(flats[group].numel() for flats in self._flats[MASTER])
            paddings = all_paddings[group] if all_paddings else [0] * len(shapes)
            at = 0
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                numel = math.prod(shape)
                fragments = []
                for rank in range(self.world_size):
                    begin, end = max(at, rank * partition), min(at + numel, (rank + 1) * partition)
                    if begin < end:
                        fragments.append(Fragment(rank, group, begin - rank * partition, begin - at, end - at))
                yield self._checked(Trained(name, tuple(shape), group, fragments))
                at += numel + padding
            if -(-at // align) != -(-held // align):
                raise self._damaged(f"group {group} has {held} elements, expected {at} and padding")

    def _stage3(self) -> Iterator[Trained]:
        ends = list(itertools.accumulate(flat.numel() for flat in self._flats[MASTER][0]))
        begins = [0, *ends[:-1]]
        group_of_flat = {
            flat: number for number, group in enumerate(self.param_groups()) for flat in group.get("params", [])
        }
        at = 0
        for name, shape in ((name, shape) for shapes in self.model["param_shapes"] for name, shape in shapes.items()):
            numel = math.prod(shape)
            part = -(-numel // self.world_size)
            first = next((i for i, end in enumerate(ends) if at < end), 0)
            fragments = []
            for rank, flat in itertools.product(range(self.world_size), range(first, len(ends))):
                # of what this rank holds of the parameter, what lies in this flat tensor
                begin, end = max(at, begins[flat]), min(at + part, ends[flat], at + numel - rank * part)
                if begin < end:
                    shift = rank * part - at
                    fragments.append(Fragment(rank, flat, begin - begins[flat], begin + shift, end + shift))
            yield self._checked(Trained(name, tuple(shape), group_of_flat.get(first, 0), fragments))
            at += part
        if at != (ends[-1] if ends else 0):
            raise self._damaged(f"a rank has {ends[-1] if ends else 0} elements, expected {at}")

    def _checked(self, trained: Trained) -> Trained:
        """All of it is there, in every part."""
        at = 0
        for fragment in trained.fragments:
            lengths = [flats[fragment.rank][fragment.flat].numel() for flats in self._flats.values()]
            if fragment.begin != at or fragment.offset + fragment.end - fragment.begin > min(lengths):
                raise self._damaged(f"{trained.name} is not whole")
            at = fragment.end
        if at != math.prod(trained.shape):
            raise self._damaged(f"{trained.name} has {at} elements, expected {math.prod(trained.shape)}")
        return trained

    def _group_of(self, flat: int) -> dict[str, Any]:
        return next((group for group in self.param_groups() if flat in group.get("params", [])), {})

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"[import] {self.path} (DeepSpeed {self.version}) is damaged: {what}. Use another checkpoint."
        )


def _folder(path: Path) -> Path:
    latest = path / "latest"
    if not path.is_dir():
        raise CheckpointError(f"[import] {path}: got no folder, expected a DeepSpeed checkpoint.")
    if any(_OPTIM_FILE.fullmatch(each.name) for each in path.iterdir()) or not latest.is_file():
        return path
    name = latest.read_text(errors="replace").strip()
    if not re.fullmatch(r"[^/\0]+", name) or name in (".", ".."):
        raise CheckpointError(f"[import] {latest} is damaged: got {name!r}, expected a folder's name.")
    return path / name


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of the optimizer's and of the model's states, in the order of ranks."""
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    optim = {match: name for name in names if (match := _OPTIM_FILE.fullmatch(name))}
    model = {match: name for name in names if (match := _MODEL_FILE.fullmatch(name))}
    if not optim or not model:
        raise CheckpointError(
            f"[import] {path}: got no *_optim_states.pt or no *_model_states.pt of ZeRO, expected a DeepSpeed "
            "checkpoint of stage 1, 2 or 3. Give the folder that is named after the tag, or the one above it."
        )
    strange = [name for name in names if name.startswith(("layer_", "expp_rank"))]
    strange += [name for match, name in {**optim, **model}.items() if int(match[2])]
    if strange:
        raise UnsupportedError(
            f"[import] {path}: got {strange[0]}, of pipeline, tensor or expert parallelism, expected data parallelism "
            "only."
        )

    def by_rank(files: dict[re.Match[str], str], kind: str) -> list[Path]:
        ranks = sorted((int(match[1] or 0), name) for match, name in files.items())
        if [rank for rank, _ in ranks] != list(range(len(ranks))):
            raise CheckpointError(
                f"[import] {path} is damaged: got {kind} states of the ranks {[rank for rank, _ in ranks]}, expected "
                "one file of each. Use another checkpoint."
            )
        return [path / name for _, name in ranks]

    return by_rank(optim, "optimizer"), by_rank(model, "model")


def _as_dict(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"[import] {path} is damaged: got a {type(value).__name__}, expected a dict.")
    return value

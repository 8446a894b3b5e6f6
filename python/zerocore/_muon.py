"""Which parameters Muon orthogonalises, and how they are matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerocore import _tensor
from zerocore.config import OptimizerConfig
from zerocore.errors import ConfigError, UnsupportedError

_NOT_MATRICES = ("embed", "lm_head")  # in names: embeddings and heads
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def groups(config: OptimizerConfig, params: Iterable[Any], model: torch.nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer "muon": each given one in two halves, with `use_muon` True and False.

    What is orthogonalised: what `use_muon` of its group says, or else its own attribute of that name; or else whatever
    has two dimensions or more and is neither an embedding, by its module or its name, nor named lm_head.

    What else stands in a group, both halves keep.

    Raises:
        ConfigError: something without two dimensions is to be orthogonalised.
    """
    by_rule = _by_rule(model)
    names = {id(param): name for name, param in model.named_parameters()}
    given = torch.optim.Optimizer(params, {}).param_groups  # whatever torch takes for parameters, as groups of lists
    halves: dict[bool, dict[str, Any]] = {
        True: {
            "lr": config.muon_lr,
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "ns_steps": config.muon_ns_steps,
            "weight_decay": config.weight_decay,
        },
        False: {name: getattr(config, name) for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")},
    }
    out = []
    for group in given:
        chosen: dict[bool, list[Any]] = {True: [], False: []}
        for param in group["params"]:
            wanted = group.get("use_muon", getattr(param, "use_muon", None))
            use = id(param) in by_rule if wanted is None else bool(wanted)
            if use and (param.dim() < 2 or param.numel() == 0):
                raise ConfigError(
                    f"[optimizer] use_muon: {names.get(id(param), 'a parameter')} has the shape {tuple(param.shape)}, "
                    "expected a matrix. Set use_muon to False for it."
                )
            chosen[use].append(param)
        for use, defaults in halves.items():
            if chosen[use]:
                not_its = {"params", "param_names", "use_muon", *(halves[not use].keys() - defaults.keys())}
                own = {key: value for key, value in group.items() if key not in not_its}
                out.append({"params": chosen[use], "use_muon": use, **defaults, **own})
    return out


def _by_rule(model: torch.nn.Module) -> set[int]:
    embeddings = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters(recurse=False)}
    names: dict[int, list[str]] = {}
    params = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name.lower())
        params[id(param)] = param
    return {
        key
        for key, param in params.items()
        if param.dim() >= 2
        and param.numel() > 0
        and key not in embeddings
        and not any(part in name for name in names[key] for part in _NOT_MATRICES)
    }


def as_matrix(param: torch.Tensor, name: str) -> tuple[int, float]:
    """The rows of a parameter as it lies in memory, row by row; and rows / columns as the model has it.

    The first dimension is the rows, all others the columns, as in convolutions. In memory it may be the transpose.

    Raises:
        UnsupportedError: its elements lie in an order in which it is neither.
    """
    rows = param.shape[0]
    columns = param.numel() // rows
    ratio = rows / columns
    if not _tensor.is_dense(param) or rows == 1 or param.stride(0) == columns:
        return rows, ratio
    if param.dim() == 2:
        return columns, ratio
    raise UnsupportedError(
        f"[optimizer] Muon: {name} has the strides {tuple(param.stride())}, expected its first dimension to be the "
        "outermost in memory. Make it contiguous, or set use_muon to False for it."
    )

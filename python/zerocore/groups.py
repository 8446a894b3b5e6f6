"""Who trains together, under DeepSpeed's names: all ranks are one data-parallel group, and there is no other kind.

Each name is there with and without an underscore before it, since scripts use both.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zerocore import comm
from zerocore.errors import ConfigError, UnsupportedError


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    """This rank's number."""
    return comm.get_rank()


def get_data_parallel_group() -> Any:
    """torch.distributed's group of all ranks.

    Raises:
        ConfigError: there is none yet.
    """
    if not comm.is_initialized():
        raise ConfigError(
            "[comm] groups: got no process group of torch.distributed, expected one. Call zerocore.init_distributed()."
        )
    return comm.group.WORLD


def get_model_parallel_world_size() -> int:
    """1: no rank holds a part of a layer's computation."""
    return 1


def get_model_parallel_rank() -> int:
    """0, of 1."""
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this one's tensor-parallel group, which is itself."""
    return comm.get_rank()


def get_model_parallel_group() -> NoReturn:
    """Raises UnsupportedError: there is no tensor or sequence parallelism, so nothing to communicate in."""
    raise UnsupportedError(
        "[comm] groups: got a request for a group of tensor or sequence parallelism, expected none: this version has "
        "data parallelism only. Ask for the world size first, which is 1."
    )


get_tensor_model_parallel_world_size = get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = get_sequence_parallel_group = get_model_parallel_group
get_sequence_data_parallel_world_size = get_data_parallel_world_size
get_sequence_data_parallel_rank = get_data_parallel_rank
get_sequence_data_parallel_group = get_data_parallel_group

_GETTERS = {name: value for name, value in globals().items() if name.startswith("get_")}
globals().update({f"_{name}": value for name, value in _GETTERS.items()})

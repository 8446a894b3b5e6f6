"""The process group of torch.distributed over the ranks of the job, for what a script does besides training.

    zerocore.init_distributed()
    sampler = torch.utils.data.DistributedSampler(data)

Training needs none of it. `zerocore.initialize()` makes the group as DeepSpeed's does; `zerocore.Engine` does not. All
other names of torch.distributed are here too (`comm.all_reduce`, `comm.new_group`).
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
from typing import Any

import torch

from zerocore import _comm, _core
from zerocore.errors import ConfigError, UnsupportedError

logger = logging.getLogger("zerocore")

_dist: Any = torch.distributed  # a build of torch may have no more than its is_available()
BACKEND = "gloo"  # for a script's own messages; engines have communicators of their own


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes torch.distributed's default group, over the ranks that MPI started. Collective; done once, then nothing.

    Also sets what other launchers have in the environment: RANK, WORLD_SIZE, LOCAL_RANK.

    Args:
        dist_backend: "gloo"; any other is named in a warning and taken as "gloo".
        timeout: of collectives; by default that of the ranks' communicator.
        dist_init_required: False: do nothing.
        rank, world_size: -1, or what MPI says.
        auto_mpi_discovery, distributed_port, verbose, init_method, config: no effect; ranks meet through MPI.

    Raises:
        ConfigError: there is a group already, of another size, or rank or world_size are other ones.
        UnsupportedError: this build of torch has no torch.distributed.
    """
    if dist_init_required is False:
        return
    if not _dist.is_available():
        raise UnsupportedError(
            "[comm] init_distributed: got a torch without torch.distributed, expected one that has it. Pass "
            "dist_init_required=False to initialize(), which needs none."
        )
    world = _comm.world()
    for name, got, expected in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if got not in (-1, expected):
            raise ConfigError(f"[comm] init_distributed: {name}: got {got}, expected {expected}, as MPI says, or -1.")
    if _dist.is_initialized():
        if (_dist.get_rank(), _dist.get_world_size()) != (world.rank, world.size):
            raise ConfigError(
                f"[comm] init_distributed: got a process group in which this is rank {_dist.get_rank()} of "
                f"{_dist.get_world_size()}, expected {world.rank} of {world.size}, as MPI says. Leave it to "
                "zerocore.init_distributed()."
            )
        return
    if dist_backend not in (None, BACKEND) and world.rank == 0:
        logger.warning("[comm] init_distributed: got backend %r; %r is used.", dist_backend, BACKEND)
    tell_environment()
    wait = timeout if timeout is not None else datetime.timedelta(milliseconds=world.timeout_ms)
    _dist.init_process_group(BACKEND, store=_meet(world, wait), rank=world.rank, world_size=world.size, timeout=wait)


def tell_environment() -> None:
    """Sets RANK, WORLD_SIZE and LOCAL_RANK to what MPI says, whatever the process that started the job had there."""
    world = _comm.world()
    for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size), ("LOCAL_RANK", _comm.local_rank())):
        os.environ[name] = str(value)


def _meet(world: _core.Communicator, timeout: datetime.timedelta) -> Any:
    """A store that all ranks reach, on rank 0, at a port that is free there."""
    if world.size == 1:
        return _dist.HashStore()
    host = "127.0.0.1" if world.backend == "shm" else socket.gethostname()
    store = None
    if world.rank == 0:
        store = _dist.TCPStore(host, 0, world.size, True, timeout, wait_for_workers=False)
    address = "" if store is None else f"{host}:{store.port}"
    host, _, port = (
        world.gather_bytes(address.ljust(512).encode(), "init_distributed")[0].decode().strip().rpartition(":")
    )
    return store if store is not None else _dist.TCPStore(host, int(port), world.size, False, timeout)


def is_initialized() -> bool:
    """Whether torch.distributed has its default group."""
    return bool(_dist.is_available() and _dist.is_initialized())


def get_rank(group: Any = None) -> int:
    """This rank's number in a group, by default of all ranks; with or without init_distributed()."""
    return int(_comm.world().rank if group is None else _dist.get_rank(group))


def get_world_size(group: Any = None) -> int:
    """The size of a group, by default of the job; with or without init_distributed()."""
    return int(_comm.world().size if group is None else _dist.get_world_size(group))


def get_local_rank() -> int:
    """This rank's number among those of its machine."""
    return _comm.local_rank()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'zerocore.comm' has no attribute {name!r}")
    return getattr(_dist, name)

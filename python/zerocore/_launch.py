"""How this process was started, from its environment alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerocore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A job started by an MPI launcher."""

    launcher: str  # for people
    size: int | None  # None: the launcher does not say, the library will
    local_rank: int | None  # this rank's number among those of its machine
    rank_variable: str  # of the environment, in which the launcher tells each process its rank
    is_on_one_machine: bool  # False where the launcher does not say


# Each launcher by the variables it sets. Open MPI's also sets those of PMIx, so it comes before.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("an mpirun of the MPICH family", "PMI_RANK", "PMI_SIZE"),
    ("a PMIx launcher (srun --mpi=pmix)", "PMIX_RANK", None),
)
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")


# Launchers that bring no MPI: their rank, and how many processes they started. A Slurm batch script is a task of its
# own; only the tasks of a step, which srun starts, have SLURM_STEP_NUM_TASKS.
_OTHERS = (
    ("torchrun or the like", "RANK", "WORLD_SIZE", "`zerocore --num-ranks {n} script.py`"),
    (
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "`srun --mpi=pmix python script.py` or `srun --mpi=pmi2 ...`, whichever `srun --mpi=list` has and the MPI "
        "library speaks, or `mpirun -n {n} python script.py` inside the allocation",
    ),
)


def rank_of(env: Mapping[str, str]) -> int:
    """This process's rank as far as its environment says; 0 without a launcher."""
    for _, rank_name, _ in _LAUNCHERS:
        if rank_name in env:
            return int(env[rank_name])
    for _, rank_name, size_name, _ in _OTHERS:
        if rank_name in env and size_name in env:
            return int(env[rank_name])
    return 0


def find_launch(env: Mapping[str, str]) -> Launch | None:
    """Tells which MPI launcher started this process; None without one.

    Args:
        env: the process's environment.

    Raises:
        ConfigError: a launcher that brings no MPI (torchrun, deepspeed, srun without --mpi) started several processes.
    """
    for launcher, rank_name, size_name in _LAUNCHERS:
        if rank_name in env:
            size = int(env[size_name]) if size_name and size_name in env else None
            local_rank = next((int(env[name]) for name in _LOCAL_RANKS if name in env), None)
            local_size = next((int(env[name]) for name in _LOCAL_SIZES if name in env), None)
            return Launch(
                launcher=launcher,
                size=size,
                local_rank=local_rank,
                rank_variable=rank_name,
                is_on_one_machine=size is not None and size == local_size,
            )
    for launcher, rank_name, size_name, way_out in _OTHERS:
        size_text = env.get(size_name) or "1"
        if env.get(rank_name) and int(size_text) > 1:
            raise ConfigError(
                f"[comm] this job was not started by an MPI launcher: got {size_name}={size_text} and no MPI rank from "
                f"{launcher}, expected mpirun or its like. Start it as {way_out.format(n=size_text)}."
            )
    return None

"""Breaks a training in four ways while it runs, and shows that it ends with the same bits as one that nobody disturbed.

    python examples/chaos.py               # or: make chaos
    python examples/chaos.py --kills 20    # a random rank in a random step, 20 times over

Trains a small GPT, undisturbed. Then once more, on 4 ranks, through `zerocore --max-restarts`, and
    - a rank is killed (SIGKILL) in the middle of a step;
    - one is killed in the middle of a save;
    - one is stopped (SIGSTOP), as if its machine hung;
    - one skips a batch.
Each time the other ranks say what is wrong, within seconds, and the job goes on from its newest whole checkpoint,
without those that died. Exit code 0 if and only if all runs end with the same parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import zerocore
from gpt import GPT, decay_groups
from jobs import RESULT, send_result
from text import Windows, load_text
from zerocore.config import CommConfig, Config, OptimizerConfig, ZeroConfig

RANKS, STEPS, STEPS_PER_EPOCH, BATCH, SEQ = 4, 24, 6, 8, 64
COMM_TIMEOUT_MS = 10_000  # so long a stopped rank is waited for; ranks that share two cores start seconds apart
LINE = 240  # characters shown of a message
SAY = "chaos: "  # begins what the worker says to the person who watches


@dataclass(frozen=True)
class Strike:
    """A rank to break at a step, in the first run of a job (0) or after a restart."""

    run: int
    rank: int
    step: int
    what: str


IN_STEP, IN_SAVE = "is killed in the middle of a step", "is killed in the middle of a save"
STOPPED, SKIPS = "is stopped, as if its machine hung", "skips a batch"
PLAN = (Strike(0, 2, 8, IN_STEP), Strike(1, 1, 12, IN_SAVE), Strike(2, 1, 14, STOPPED), Strike(3, 1, 16, SKIPS))


class Chaos:
    """Breaks this rank when its time has come."""

    def __init__(self, engine: zerocore.Engine, folder: Path, strikes: Iterable[Strike]):
        self.engine, self.folder = engine, folder
        here = (int(os.environ["ZC_RESTART"]), engine.rank)
        self.strikes = [strike for strike in strikes if (strike.run, strike.rank) == here]

    def due(self, what: str) -> bool:
        """Whether this is the moment. Once; tells the person who watches."""
        for strike in self.strikes:
            if (strike.step, strike.what) == (self.engine.global_steps, what):
                self.strikes.remove(strike)
                print(f"{SAY}rank {strike.rank} {what}, step {strike.step} of {STEPS}", flush=True)
                return True
        return False

    def skips_batch(self) -> bool:
        """Before each micro-batch."""
        return self.due(SKIPS)

    def in_step(self) -> None:
        """Between a forward and its backward."""
        if self.due(IN_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due(STOPPED):
            os.kill(os.getpid(), signal.SIGSTOP)

    def before_save(self) -> None:
        """A thread kills the rank as soon as its file is there, which is while it is being written or synced."""
        if self.due(IN_SAVE):
            threading.Thread(target=self._kill_in_save, daemon=True).start()

    def _kill_in_save(self) -> None:
        name = f"rank_{self.engine.rank:05}.safetensors"
        while not any(self.folder.glob(f".*.saving/{name}")):
            time.sleep(1e-4)
        os.kill(os.getpid(), signal.SIGKILL)


def work(folder: Path, strikes: Iterable[Strike]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT(layers=2, hidden=128, heads=4, seq=SEQ)
    config = Config(
        train_batch_size=BATCH,
        micro_batch_size=1,
        gradient_clipping=1.0,
        optimizer=OptimizerConfig(type="adamw", lr=1e-3, weight_decay=0.1),
        zero=ZeroConfig(stage=2),
        comm=CommConfig(timeout_ms=COMM_TIMEOUT_MS),
    )
    data = torch.utils.data.Subset(Windows(load_text()[0], seq=SEQ), range(STEPS_PER_EPOCH * BATCH))
    engine = zerocore.Engine(model, config, model_parameters=decay_groups(model), training_data=data)
    chaos = Chaos(engine, folder, strikes)
    path, _ = engine.resume(folder)
    if path is not None and engine.rank == 0:
        print(f"{SAY}{engine.world_size} ranks go on from {Path(path).name}", flush=True)
    while engine.global_steps < STEPS:
        for tokens, targets in engine.training_dataloader:
            if chaos.skips_batch():
                continue
            loss = engine(tokens, targets)
            chaos.in_step()
            engine.backward(loss)
            engine.step()
        chaos.before_save()
        engine.save_checkpoint(folder)
    sha256 = zerocore.utils.params_sha256(model)
    if engine.rank == 0:
        send_result({"ranks": engine.world_size, "sha256": sha256})


class Watch:
    """Prints with the seconds since the start, and what comes after a disturbance with those since."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.struck: float | None = None

    def show(self, text: str, *, strikes: bool = False) -> None:
        """One line; `strikes`: a disturbance."""
        now = time.monotonic()
        since = "" if self.struck is None or strikes else f"+{now - self.struck:.1f} s "
        self.struck = now if strikes else self.struck
        print(f"{now - self.start:6.1f} s  {since:>9}{text[:LINE]}{'...' if len(text) > LINE else ''}", flush=True)


def run(watch: Watch, ranks: int, strikes: Iterable[Strike] = ()) -> dict[str, Any]:
    """A whole job, its restarts included; shows what the ranks and the launcher say. Returns what rank 0 sent."""
    zerocore_command = [sys.executable, "-m", "zerocore", "--num_ranks", str(ranks), "--max-restarts", "6"]
    result, output = None, []
    with tempfile.TemporaryDirectory() as folder:
        worker = [__file__, "--worker", folder, json.dumps([asdict(strike) for strike in strikes])]
        job = subprocess.Popen(
            [*zerocore_command, "--grace-seconds", "3", *worker],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert job.stdout is not None
            for line in job.stdout:
                output.append(line)
                if line.startswith(RESULT):
                    result = json.loads(line[len(RESULT) :])
                elif line.startswith(SAY):
                    watch.show(line[len(SAY) :].rstrip(), strikes="go on" not in line)
                elif line.startswith("zerocore: "):
                    watch.show(line.split(" If nobody did that")[0].rstrip())
        finally:
            job.terminate()
            job.wait()
    if result is None:
        sys.exit(f"chaos.py: the job ended with exit code {job.returncode} and without a result:\n{''.join(output)}")
    return result


def random_kill(random: Random) -> Strike:
    """A rank, a step, and half of the times at an epoch's end the save after it."""
    rank, step = random.randrange(RANKS), random.randrange(STEPS)
    in_save = step > 0 and step % STEPS_PER_EPOCH == 0 and random.random() < 0.5
    return Strike(0, rank, step, IN_SAVE if in_save else IN_STEP)


def main() -> int:
    """The undisturbed run, the others, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, metavar="N", help="N jobs, in each of which a random rank is killed")
    parser.add_argument("--seed", type=int, default=0, help="of --kills")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, strikes = args.worker
        work(Path(folder), [Strike(**strike) for strike in json.loads(strikes)])
        return 0
    random = Random(args.seed)
    plans = [[random_kill(random)] for _ in range(args.kills)] if args.kills else [PLAN]
    watch = Watch()
    watch.show(f"{STEPS} steps on one rank, undisturbed")
    undisturbed = run(watch, 1)
    ends = []
    for number, plan in enumerate(plans, 1):
        watch.show(f"the same on {RANKS} ranks, disturbed" + (f", {number} of {len(plans)}" if args.kills else ""))
        ends.append(run(watch, RANKS, plan))
    print(f"undisturbed, on 1 rank:        params sha256 {undisturbed['sha256']}")
    for end in ends:
        print(f"disturbed, ended on {end['ranks']} ranks:  params sha256 {end['sha256']}")
    same = all(end["sha256"] == undisturbed["sha256"] for end in ends)
    print("the same parameters, bit for bit" if same else "THE PARAMETERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

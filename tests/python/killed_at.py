"""Runs a training script in which one rank is killed, with SIGKILL, as it begins a step of the job's first start.

python killed_at.py RANK STEP script.py [arguments]
"""

import os
import runpy
import signal
import sys

import zerocore

rank, step = int(sys.argv[1]), int(sys.argv[2])
sys.argv = sys.argv[3:]
if os.environ.get("ZC_RESTART", "0") == "0":
    forward = zerocore.Engine.forward

    def until_then(self, *args, **kwargs):
        if self.rank == rank and self.global_steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, *args, **kwargs)

    zerocore.Engine.forward = until_then
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")

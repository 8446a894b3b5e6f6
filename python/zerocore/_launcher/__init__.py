"""Starts a script on several ranks, shows what fails first, ends what is left, and starts again.

    launcher (run.py)  --starts-->  mpirun  --starts-->  a shim a rank (shim.py)  --starts-->  the script
         ^                                                  |                                    |
         +------------------ a channel (server.py, zerocore._channel) --------------------------+

mpirun kills a job as soon as one of its processes ends badly. Here its processes are the shims, which outlive the
script: the other ranks live on, find out, and say what they have to say. The launcher hears of everything over the
channel, decides when the job is over, and tells the shims. mpirun's own exit code means nothing then.
"""

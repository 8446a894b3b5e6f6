#!/bin/sh
# Builds zerocore for the GPU of this machine, checks that it computes the CPU's bits, and measures it. No network.
#
#   bench/gpu_check.sh [FILE.json] [--only STEP ...] [--dry]
#
# Needs one NVIDIA GPU with its driver, nvcc 12 or newer, cmake, ninja, and a Python (PYTHON, else python3) with a CUDA
# build of torch, pybind11, pydantic and xxhash; mpi4py and an MPI for the step with two ranks. What that Python lacks
# may lie as wheels in the folder ZC_WHEELS (default: build/wheels), which are unpacked into a temporary folder. To fill
# it, on a machine with network:
#
#   pip download -d build/wheels --only-binary :all: --no-deps --python-version 3.12 \
#       --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
#       pydantic pydantic-core annotated-types typing-extensions typing-inspection mpich mpi4py
#
# Takes at most 8 minutes. The steps are the files of bench/gpu that gpu_check.py lists; each stands alone
# (python bench/gpu/STEP.py), has a time limit, and the rest goes on when one fails. Prints a table and writes FILE.json
# (default: build/gpu_check.json). Exit code 1: a step failed, or bits differ. --dry tests these scripts where there is
# no GPU: the module that is there, on the CPU, in little; what needs CUDA is left out and named.
set -eu
cd "$(dirname "$(dirname "$(readlink -f "$0")")")"
python=$(command -v "${PYTHON:-python3}")
wheels=${ZC_WHEELS:-build/wheels}
if [ -n "$(ls "$wheels"/*.whl 2>/dev/null)" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  # Not --target, which leaves the library out of an MPI's wheel.
  "$python" -m pip install -q --no-index --no-deps --no-compile --ignore-installed --prefix "$site" "$wheels"/*.whl
  packages=$("$python" -c "if True:
      import sys, sysconfig
      print(sysconfig.get_path('purelib', vars=dict.fromkeys(('base', 'platbase'), sys.argv[1])))" "$site")
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
  for library in "$site"/lib/libmpi.so.*; do  # an MPI's wheel: for the build, and for mpi4py
    if [ -e "$library" ]; then export ZC_MPI_PREFIX="$site" MPI4PY_LIBMPI="$library"; fi
  done
fi
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
"$python" bench/gpu/gpu_check.py "$@"

# Every target does its own set-up. See `make help`, and tools/environment.py for what that is.

PYTHON ?= python3
PRESET ?= dev
ARGS ?=

RUN := tools/with-env
# What runs on simulated GPUs as well.
SIMULATED := tests/python/test_engine.py tests/python/test_same_bits.py -k "test_engine or (2ranks and not shared)"
CPP_FILES = $(shell find cpp cuda python/src tests/cpp bench -name '*.h' -o -name '*.cpp' -o -name '*.cu')
PY_FILES := python tests examples bench tools

.PHONY: help build train proof chaos test soak cuda check-ptxas format lint clean
.PHONY: bench bench-page bench-cpp bench-adam bench-step bench-collectives bench-guard bench-checkpoint

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 19

build: environment  ## build the package in place (python/zerocore)
	@$(RUN) tools/build $(PRESET) python

train: build  ## train a small GPT on two ranks; flags: make train ARGS="--stage 1 --steps 50"
	@$(RUN) mpirun -n 2 python examples/train_gpt.py $(ARGS)

proof: build  ## the same bits in every stage on 1, 2 and 4 ranks, as a table
	@$(RUN) python examples/proof.py $(ARGS)

chaos: build  ## kill, stop and confuse ranks of a training that ends with the same bits all the same
	@$(RUN) python examples/chaos.py $(ARGS)

test: environment-test  ## all C++ and Python tests
	@tools/debian-packages libgtest-dev
	@$(RUN) tools/build $(PRESET) all -DZC_BUILD_TESTS=ON
	@$(RUN) ctest --test-dir build/$(PRESET) --output-on-failure -j 2
	@$(RUN) python -m pytest $(ARGS)
	@echo "engines on simulated GPUs"
	@ZC_TEST_SIMULATED_CUDA=$$(echo build/$(PRESET)/simulated/_core*.so) $(RUN) python -m pytest $(SIMULATED)

soak: environment-test  ## the long tests: nothing grows, nothing saved is lost to a crash, killed ranks leave nothing
	@tools/debian-packages libgtest-dev
	@$(RUN) tools/build $(PRESET) all -DZC_BUILD_TESTS=ON
	@ZC_TEST_KILLED_GROUPS=1000 $(RUN) ctest --test-dir build/$(PRESET) --output-on-failure -R KilledGroups
	@ZC_TEST_FOUR_RANKS=1 $(RUN) python -m pytest tests/python/test_same_bits.py -k 4ranks
	@$(RUN) python -m pytest -m soak $(ARGS)

cuda: environment  ## build with the CUDA backend, in place; needs nvcc 12 or newer, no GPU
	@$(RUN) tools/build cuda python

check-ptxas: cuda  ## see that each CUDA kernel keeps everything in registers
	@$(RUN) tools/check_ptxas.py build/cuda

bench: environment  ## steps, collectives and kernels beside their peers, in a few minutes; page in build/bench/benchmarks.md
	@tools/debian-packages libbenchmark-dev
	@$(RUN) tools/build $(PRESET) all -DZC_BUILD_BENCH=ON
	@$(RUN) python bench/report.py --binaries build/$(PRESET)/bench $(ARGS)

bench-page:  ## make docs/benchmarks.md of what `make bench` has measured
	@cp build/bench/bench.json docs/benchmarks.json
	@$(RUN) python bench/page.py docs/benchmarks.json docs

bench-cpp: environment  ## all C++ benchmarks, each kernel and collective beside its ceiling or floor
	@tools/debian-packages libbenchmark-dev
	@$(RUN) tools/build $(PRESET) all -DZC_BUILD_BENCH=ON
	@for bench in build/$(PRESET)/bench/*_bench; do $$bench || exit 1; done

bench-step: build  ## whole training steps against DDP, FSDP2 and DeepSpeed
	@$(RUN) python bench/python/bench_step.py $(ARGS)

bench-adam: build  ## one AdamW step against torch's optimizers and DeepSpeedCPUAdam
	@$(RUN) python bench/python/bench_adam.py $(ARGS)

bench-collectives: build  ## collectives against gloo, MPI and the copies that none can do without
	@$(RUN) python bench/python/bench_collectives.py $(ARGS)

bench-guard: build  ## what the collective guard costs of a step
	@$(RUN) python bench/python/bench_guard.py $(ARGS)

bench-checkpoint: build  ## save and load against torch.save, torch.distributed.checkpoint and DeepSpeed
	@$(RUN) python bench/python/bench_checkpoint.py $(ARGS)

format: build/lint  ## format all sources
	@build/lint/bin/clang-format -i $(CPP_FILES)
	@build/lint/bin/ruff check --quiet --select I --fix $(PY_FILES)
	@build/lint/bin/ruff format $(PY_FILES)

lint: environment build/lint  ## check format, lint and types
	@build/lint/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@build/lint/bin/ruff format --check $(PY_FILES)
	@build/lint/bin/ruff check $(PY_FILES)
	@$(RUN) sh -c 'build/lint/bin/mypy --python-executable "$$(command -v python)"'

clean:  ## remove all that was built; .venv stays
	rm -rf build dist python/zerocore/*.so

.PHONY: environment environment-test
environment:
	@$(PYTHON) tools/environment.py
environment-test:
	@$(PYTHON) tools/environment.py test

# The formatters and checkers, pinned, in an environment of their own.
build/lint: tools/lint-requirements.txt
	@echo "[set-up] making build/lint with $$(tr '\n' ' ' <$<)"
	@$(PYTHON) -m venv --clear $@
	@$@/bin/pip install -q -r $<
	@touch $@

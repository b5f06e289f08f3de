# make train, make test: everything else follows from them. VENV chooses the environment, JOBS the parallel compilers.
VENV ?= .venv
JOBS ?= $(shell nproc)
# Fastest from nothing; with 0 fastest after a change to a few files.
UNITY_GROUPS ?= $(shell expr 2 \* $(JOBS))
BUILD ?= $(if $(filter .venv,$(VENV)),build,$(VENV)/build)

BIN := $(abspath $(VENV))/bin
PYTHON := $(BIN)/python
STAMPS := $(VENV)/.stamps
# The environment's tools first: cmake, ninja, ruff, clang-format.
export PATH := $(BIN):$(PATH)
CPP_FILES = $(shell find csrc tests/cpp tests/programs tests/support examples/cpp benchmarks/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.h.in')
PY_FILES = python tests/python tests/differential tests/gpu tests/support examples/python examples/migrations examples/ray benchmarks docs tools setup.py
TIMED = tools/timed.sh
CMAKE = cmake -S . -G Ninja -DPython_EXECUTABLE=$(PYTHON) -DMUSTER_WERROR=ON -DMUSTER_TESTS=ON -DMUSTER_UNITY_GROUPS=$(UNITY_GROUPS)

.PHONY: cuda dev docs docs-only gpu-check train test test-long test-sanitize fuzz lint lint-only format dist bench clean package
.DELETE_ON_ERROR:

train: package
	$(PYTHON) examples/python/digits.py

# Threads that wait for one another leave the processor to the other tests.
test: export OMP_WAIT_POLICY = passive
test: package cuda $(STAMPS)/dev
	$(TIMED) "C++ tests, compiled" cmake --build $(BUILD) -j $(JOBS) --target all muster_tests
	tools/beside.sh tools/computing_tests.sh $(BUILD) -- $(TIMED) "C++ tests" $(BUILD)/muster_tests "~[simulation]~[.]"
	@# Two at once, each with files of its own, in conftest.py's order: most tests wait for other processes.
	$(TIMED) "Python tests" $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Compiles and links the CUDA side where nvcc is found; nothing of it runs. A GPU is `make gpu-check`'s business.
cuda: $(STAMPS)/dev
	$(TIMED) "CUDA side, compiled" tools/build_cuda.sh $(VENV) $(BUILD)-cuda $(JOBS)

# Needs neither the environment nor a network: GPU_PYTHON's torch and the system's tools (docs/gpu.md).
GPU_PYTHON ?= python3
gpu-check:
	$(GPU_PYTHON) tools/gpu_check.py --torch $(VENV)/cuda/torch --build $(BUILD)-gpu --jobs $(JOBS) $(GPU_CHECK)

test-long: test
	$(BUILD)/muster_tests "[long]"
	$(BUILD)/muster_cuda_tests "[long]"
	$(PYTHON) -m pytest -m long

test-sanitize: $(STAMPS)/dev test-address test-thread

test-address test-thread: test-%: $(STAMPS)/dev
	$(CMAKE) -B $(BUILD)-$* -DMUSTER_SANITIZE=$*
	cmake --build $(BUILD)-$* -j $(JOBS)
	tools/sanitized.sh $* $(BUILD)-$*/muster_tests
	tools/sanitized.sh $* $(BUILD)-$*/muster_cuda_tests
	tools/sanitized.sh $* $(BUILD)-$*/muster_device_tests

FUZZ_SECONDS ?= 300
fuzz: package $(STAMPS)/dev
	tools/fuzz.sh $(PYTHON) $(BUILD) $(FUZZ_SECONDS)

# clang-tidy reads a compile database of its own: it knows neither gcc's precompiled headers nor ccache.
lint: package dev
	$(MAKE) --no-print-directory lint-only

# On what `make package dev` left.
lint-only:
	clang-format --dry-run -Werror $(CPP_FILES)
	ruff check $(wildcard $(PY_FILES))
	ruff format --check $(wildcard $(PY_FILES))
	$(PYTHON) tools/house.py
	mypy --python-executable $(PYTHON)
	MYPYPATH=python $(PYTHON) -m mypy.stubtest --allowlist tools/stubtest_allowlist.txt muster._C muster._build_info
	$(CMAKE) -B $(BUILD)-lint -DMUSTER_PYTHON=ON -DMUSTER_CCACHE= -DMUSTER_OPENMP=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
	@# Where doxygen could not be installed the rest of the lint is still worth having.
	@if command -v doxygen >/dev/null; then $(MAKE) --no-print-directory docs-only; else echo "No doxygen: the site is not built"; fi
	$(TIMED) "clang-tidy, beside the tests in CI" tools/clang_tidy.sh $(BUILD)-lint $(JOBS)

# The site, in build/docs/html. Warnings are errors.
docs: package dev
	$(MAKE) --no-print-directory docs-only

# On what `make package dev` left.
docs-only: export MUSTER_DOXYGEN = $(abspath $(BUILD))/docs/doxygen
docs-only:
	@command -v doxygen >/dev/null || { echo "The reference of C++ needs doxygen: sudo apt-get install doxygen" >&2; exit 1; }
	mkdir -p $(MUSTER_DOXYGEN)
	doxygen docs/Doxyfile
	$(PYTHON) -m sphinx --quiet --fail-on-warning --fresh-env -c docs -d $(BUILD)/docs/doctrees . $(BUILD)/docs/html

format: $(STAMPS)/dev
	clang-format -i $(CPP_FILES)
	ruff check --fix $(wildcard $(PY_FILES))
	ruff format $(wildcard $(PY_FILES))

dist: $(STAMPS)/dev
	$(PYTHON) -m build --no-isolation --outdir dist

bench: package $(STAMPS)/dev
	cmake -S benchmarks/cpp -B $(BUILD)-bench -G Ninja -Dmuster_ROOT=$$($(PYTHON) -m muster --cmake-dir)
	cmake --build $(BUILD)-bench -j $(JOBS)
	$(PYTHON) -m muster bench --cpp $(BUILD)-bench --out benchmarks/results

clean:
	rm -rf build build-* dist $(BUILD) $(BUILD)-* *.egg-info python/*.egg-info

# --- set-up: each step leaves a stamp, so doing it again costs seconds ------------------------------------------------
package: $(BUILD)/build.ninja
	$(TIMED) "library, compiled" cmake --build $(BUILD) -j $(JOBS) --target muster _C
	$(PYTHON) tools/link_package.py $(BUILD)

$(BUILD)/build.ninja: $(STAMPS)/train
	$(CMAKE) -B $(BUILD) -DMUSTER_PYTHON=ON

# A build imports little, so nothing is compiled for it; tests start Python a thousand times. Some packages hold files that
# are no Python.
$(STAMPS)/train: requirements-train.txt | $(STAMPS)/venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	touch $@

dev: $(STAMPS)/dev

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/train
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	$(PYTHON) -m compileall -q -q -j $(JOBS) -x '/(ray/rllib|ray/tune|transformers/models/(?!(auto|bert|vit)/)[a-z0-9_]+|[a-z]+/tests)/' $(VENV)/lib || true
	touch $@

$(STAMPS)/venv: tools/setup_system.sh
	tools/setup_system.sh $(VENV)
	mkdir -p $(STAMPS)
	touch $@

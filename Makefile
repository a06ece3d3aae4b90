# The README's commands are `make demo`, `make frameworks` and `make test`. Each makes .venv and installs what it needs; the
# kernels are compiled once for all of them.
PYTHON ?= python3
BIN := .venv/bin
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
TESTING := .venv/.installed .venv/.group-test
SOURCES := $(wildcard csrc/*.?pp csrc/*/*.?pp csrc/*/*/*.?pp tests/backends/native/*.cpp)
WORKERS := -n auto --dist loadgroup

.PHONY: demo frameworks test test-all test-full lint format clean sanitize sanitize-address sanitize-thread fuzz soak \
  bench bench-against docs dist

demo: .venv/.installed
	$(BIN)/attngrad demo

# PyTorch, JAX and Transformers into .venv, for the examples of the README; `make test` uses the same.
frameworks: .venv/.installed .venv/.group-frameworks

# Before a commit, in minutes: every package, every pass, every option alone, one instruction set per family.
test: $(TESTING) lint
	$(BIN)/python -m pytest $(WORKERS)

# Pairs of options, all instruction sets, several seeds. SINCE_TEST=1 leaves out what `make test` has run.
test-all: $(TESTING) .venv/.test-only .venv/.group-docs lint
	$(BIN)/python -m pytest $(WORKERS) -m "$(if $(SINCE_TEST),thorough and not full,not full)"

# The long runs too: 100 seeds of each right implementation, every pair of mistakes. About an hour.
test-full: $(TESTING) .venv/.test-only .venv/.group-docs lint
	$(BIN)/python -m pytest $(WORKERS) -m ""

lint: .venv/.group-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/mypy

format: .venv/.group-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(SOURCES)

# Side by side with torch, jax and NumPy; leave the machine alone meanwhile. With DEVICE=cuda: the tensors of that device
# beside PyTorch's own attention, time and peak memory.
bench: .venv/.installed .venv/.group-bench
ifdef DEVICE
	$(BIN)/python -m benchmarks.device --device $(DEVICE) $(ARGS)
else
	$(BIN)/python -m benchmarks --json benchmarks/results.json --markdown docs/benchmarks.md --plots docs/benchmarks
	$(BIN)/python -m benchmarks.in_model --json benchmarks/in_model.json --markdown docs/in_a_model.md
endif

# The kernels as they are beside those of another revision, row by row: what shows that a change costs no speed.
bench-against: .venv/.installed
	$(BIN)/python -m benchmarks.against $(REV) $(ARGS)

# The site, into build/docs/index.html; warnings are errors.
docs: .venv/.installed .venv/.group-docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs

# The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, then the pool under ThreadSanitizer; each in an
# environment of its own that borrows the other packages of .venv. Python itself is not instrumented.
SANITIZED := .venv-sanitize
define install-sanitized
	$(BIN)/python -m venv $(SANITIZED)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(SANITIZED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	$(SANITIZED)/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall \
	  -C cmake.define.ATTNGRAD_SANITIZE=$(SANITIZERS) -C cmake.define.ATTNGRAD_TEST_ONLY=ON -C build-dir=build/$@ .
endef
sanitize: sanitize-address sanitize-thread

sanitize-address: SANITIZERS := address,undefined
sanitize-address: $(TESTING)
	$(install-sanitized)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $(SANITIZED)/bin/python -m pytest $(WORKERS) -m "not full" -p no:cacheprovider \
	  tests/backends/test_kernels*.py tests/backends/test_matrix_tiles.py tests/functional/test_attention.py tests/functional/test_tangents.py tests/core/test_philox.py \
	  -k "not linear_memory"

# First the pool without Python, then the tests of threads in one process. What is reported ends it with exit status 66.
# OpenBLAS, which the reference multiplies by, is not instrumented: its own threads would be reported.
RACES := TSAN_OPTIONS="halt_on_error=1 exitcode=66 die_after_fork=0"
sanitize-thread: SANITIZERS := thread
sanitize-thread: $(TESTING)
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g -fsanitize=thread -pthread -Icsrc -o build/pool tests/backends/native/pool.cpp csrc/runtime/thread_pool.cpp csrc/runtime/loan.cpp csrc/runtime/buffers.cpp
	$(RACES) build/pool
	$(install-sanitized)
	LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" $(RACES) OPENBLAS_NUM_THREADS=1 \
	  $(SANITIZED)/bin/python -m pytest -m "not full" -p no:cacheprovider --capture=sys tests/robustness/test_load.py tests/backends/test_kernels*.py \
	  -k "thread or at_once or workers or fork or interpreter or alive"

# Random inputs for the kernels, the arguments, the formula parser, the loaders and the command, for MINUTES in all;
# exit 1 with the way to see a finding again. PARTS="files commands" runs these alone.
MINUTES ?= 10
PARTS ?=
fuzz: $(TESTING) .venv/.test-only .venv/.group-fuzz
	$(BIN)/python tests/robustness/fuzz.py $(PARTS) --minutes $(MINUTES)

# Memory under load: 100,000 small calls, then 5 minutes of every pass from 8 threads. Exit 1 where it grows.
soak: $(TESTING)
	$(BIN)/python tests/robustness/soak.py

# An sdist, and a wheel that is built from it, into dist/. The wheel then has to work in an empty environment whose PATH
# has no compiler.
dist: .venv/.group-dist
	rm -rf dist build/smoke
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tests/packaging/dist.py
	$(BIN)/python -m venv build/smoke
	PATH=$(CURDIR)/build/smoke/bin build/smoke/bin/python -m pip install --quiet --only-binary :all: dist/*.whl
	cd build/smoke && PATH=$(CURDIR)/build/smoke/bin bin/python -I ../../tests/packaging/smoke.py

clean:
	rm -rf .venv .venv-sanitize build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attngrad needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check 'pip>=25.1'  # the first that knows groups

# The packages of a dependency group of pyproject.toml.
.venv/.group-%: pyproject.toml | .venv/bin/python
	$(BIN)/python tools/install.py $*
	touch $@

# The package itself, editable, compiled with what is in .venv: the same command lines every time, so that a change in one
# file compiles that file alone.
.venv/.installed: .venv/.group-build $(BUILD_INPUTS)
	$(BIN)/python tools/install.py --package
	touch $@

# The instruction sets that only the tests use, beside it.
.venv/.test-only: .venv/.installed
	$(BIN)/python tools/install.py --package ATTNGRAD_TEST_ONLY=ON
	touch $@

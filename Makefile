# The two commands of the README are `make demo` and `make test`. Both need Python 3.11 to 3.13, git
# and make, set up everything in .venv the first time, and work from any path: every path here is
# relative, and programs run as `python -m`, because a script's first line cannot hold a space.
# `make test PYTEST_ARGS="tests/envs -x"` and `make demo DEMO_ARGS="--out DIR"` pass options on.

.DEFAULT_GOAL := help
PY := .venv/bin/python
# The first of these that is a usable Python 3.11 to 3.13; `make PYTHON=/path/to/python demo` decides.
PYTHON ?= python3.11 python3.12 python3.13 python3 python
PYTEST_ARGS ?=
# A file stays in one process, so that what it compiled is found again, and the longest files begin,
# see tests/conftest.py. A process that dies ends the
# run: the plugin would start another, and then wait for ever for the files of the first.
TEST_PROCESSES ?= 2
IN_PARALLEL = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
DEMO_ARGS ?=
BENCH_ARGS ?= all
# Where torch without CUDA is found.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Another active environment, or pip settings meant for it, must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX
# Images for containers often forbid it: then each process compiles all of jax's source again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# A .venv whose interpreter is gone (moved, upgraded) counts as not installed.
DEAD := $(shell env -u PYTHONHOME -u PYTHONPATH .venv/bin/python -c pass 2>/dev/null || echo FORCE)

DEAD_ORACLES := $(shell .venv-oracles/bin/python -c pass 2>/dev/null || echo FORCE)
DEAD_DOCS := $(shell .venv-docs/bin/python -c pass 2>/dev/null || echo FORCE)
DEAD_PEERS := $(shell .venv-peers/bin/python -c pass 2>/dev/null || echo FORCE)

.PHONY: help setup demo test check test-slow test-newest slow-due soak test-fresh test-oracles lint format docs site notebooks bench bench-peers lock wheel clean FORCE
help:
	@echo "make demo       set up .venv, then train, backtest and paper-replay on real bars"
	@echo "make test       set up .venv, then run the tests"
	@echo "make check      lint, and the tests nearest to what changed against main: under 2 minutes"
	@echo "make test-slow  the slow tests     make lint    ruff and pyright     make format  fix style"
	@echo "make slow-due   which slow tests CI runs at this merge, and the longest wait of the others"
	@echo "make test-newest  tests under Python 3.13 and the newest jax, in .venv-newest"
	@echo "make soak       kill paper sessions: 200 times at random, and before and after each kind of event;"
	@echo "                then trade 50,000 bars against an exchange that breaks"
	@echo "make test-fresh property tests on newly drawn cases; SEED=N repeats them"
	@echo "make bench      measure            make lock    renew the lock files make wheel   build"
	@echo "make test-oracles  set up .venv-oracles, then compare with vectorbt and backtesting.py; TPU plans"
	@echo "make bench-peers   set up .venv-peers (2 GB), then measure beside other environments and learners"
	@echo "make docs       draw docs/architecture.svg from the code"
	@echo "make site       set up .venv-docs, then build the site into build/site"
	@echo "make notebooks  run the notebooks, and renew what they show"
	@echo "make clean      remove the environments and caches (runs/ stays)"

setup: .venv/.installed
FORCE:

.venv/.installed: requirements.lock pyproject.toml $(DEAD)
	@if ! $(PY) -c "$(USABLE)" 2>/dev/null || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for python in $(PYTHON); do \
	    if "$$python" -c "$(USABLE)" >/dev/null 2>&1; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "no usable Python 3.11 to 3.13 among: $(PYTHON). Install one with its venv module (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11 demo" >&2; \
	    exit 1; \
	  fi; \
	  echo "setting up .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear .venv; \
	fi
	@echo "installing the locked packages into .venv (about a minute the first time)"
	@$(PY) -m pip install --quiet --no-compile --require-hashes --requirement requirements.lock
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: .venv/.installed
	@$(PY) -m nca_trader demo $(DEMO_ARGS)

test: .venv/.installed
	@$(PY) -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

# `make check CHECK_ARGS="--base origin/main --seconds 300"` compares with another branch, for longer.
# pytest ends with 5 where all chosen tests are slow ones.
CHECK_ARGS ?=
check: lint
	@tests="$$($(PY) tools/affected.py $(CHECK_ARGS))" || exit 1; [ -z "$$tests" ] || \
	  $(PY) -m pytest -q $(IN_PARALLEL) $$tests $(PYTEST_ARGS) || [ $$? = 5 ]

# Property tests draw the same cases in every `make test`, and others here; SEED=N repeats them.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-slow: .venv/.installed
	@$(PY) -m pytest -m slow --hypothesis-seed=$(SEED) $(PYTEST_ARGS)

# The newest Python and jax that are supported; `NEWEST=python3.13` names the interpreter.
NEWEST ?= $(shell for python in python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python3.13; do \
  "$$python" -c "import venv, ensurepip" 2>/dev/null && echo "$$python" && break; done)
NEWEST_JAX ?= 0.12.0.1
.venv-newest/.installed: requirements.lock pyproject.toml
	@[ -n "$(NEWEST)" ] || { echo "no python3.13 was found; name one: make NEWEST=/path/to/python3.13 test-newest" >&2; exit 1; }
	@echo "installing the locked packages and jax $(NEWEST_JAX) for $(NEWEST) into .venv-newest"
	@$(NEWEST) -m venv --clear .venv-newest
	@.venv-newest/bin/python -m pip install --quiet --no-compile --require-hashes --requirement requirements.lock
	@.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade "jax==$(NEWEST_JAX)" "jaxlib==$(NEWEST_JAX)"
	@.venv-newest/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-newest: .venv-newest/.installed
	@.venv-newest/bin/python -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

# What CI runs of the slow tests at this merge; the longest wait of the others is printed.
slow-due: .venv/.installed
	@$(PY) -m pytest -m "slow or hypothesis" --due --collect-only $(PYTEST_ARGS)

soak: .venv/.installed
	@SOAK_BARS=50000 $(PY) -m pytest -m "" tests/paper/session/test_faults.py tests/paper/session/test_kill.py \
	  tests/paper/session/test_soak.py $(PYTEST_ARGS)

test-fresh: .venv/.installed
	@$(PY) -m pytest -m "hypothesis and not slow" --hypothesis-seed=$(SEED) $(IN_PARALLEL) $(PYTEST_ARGS)

# The engines have a venv of their own, which sees the packages of .venv behind its own: pip takes
# those for installed and fetches 400 MB, not 1.4 GB. The path is relative: a checkout may move.
PURELIB := import os, sysconfig; print(os.path.relpath(sysconfig.get_path("purelib")))
# torch and what stands on it come without hashes, pinned by the peers' lock: see there.
# What the TPU compiler says of slices, of the automaton's rule, and of programs known by hand.
PLANNED := tests/scale/test_compiled.py tests/scale/test_core.py tests/scale/test_cost.py \
           tests/scale/test_layout.py

# Each other slice is a minute more: `make test-oracles BRIEF=planned` plans them all, and
# `PLAN_ARGS="--due"` runs those of these tests whose turn it is.
BRIEF := not (planned and (v6e or v5p or tpu7x))

.venv-oracles/.installed: requirements-oracles.lock requirements-peers.lock $(DEAD_ORACLES) | .venv/.installed
	@echo "installing the engines that tests compare with into .venv-oracles (about a minute)"
	@$(PY) -m venv --clear .venv-oracles
	@own="$$(.venv-oracles/bin/python -c '$(PURELIB)')" && \
	  echo "../../../../$$($(PY) -c '$(PURELIB)')" > "$$own/project.pth"
	@.venv-oracles/bin/python -m pip install --quiet --no-compile --require-hashes \
	  --requirement requirements-oracles.lock
	@.venv-oracles/bin/python -m pip install --quiet --no-compile --no-deps \
	  --extra-index-url $(TORCH_INDEX) "$$(grep '^torch==' requirements-peers.lock)"
	@.venv-oracles/bin/python -m pip install --quiet --no-compile \
	  --constraint requirements-peers.lock stable-baselines3
	@touch $@

test-oracles: .venv-oracles/.installed
	@.venv-oracles/bin/python -m pytest $(IN_PARALLEL) tests/oracles tests/watch/test_watch_metrics.py $(PYTEST_ARGS)
	@.venv-oracles/bin/python -m pytest $(IN_PARALLEL) $(PLANNED) -m "" -k "$(BRIEF)" $(PLAN_ARGS) $(PYTEST_ARGS)

# No hashes here: torch without CUDA has another file on every index. It comes first and alone, so
# that nothing after it asks the registry for the build with CUDA.
# Without dependencies, since the lock has them all: gym-trading-env 0.3.5 asks for packages of 2023.
.venv-peers/.installed: requirements-peers.lock $(DEAD_PEERS) | .venv/.installed
	@echo "installing the environments to measure beside into .venv-peers (two minutes, 2 GB)"
	@$(PY) -m venv --clear .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --no-compile --no-deps \
	  --extra-index-url $(TORCH_INDEX) "$$(grep '^torch==' requirements-peers.lock)"
	@.venv-peers/bin/python -m pip install --quiet --no-compile --no-deps \
	  --requirement requirements-peers.lock
	@.venv-peers/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@.venv-peers/bin/python -m pip install --quiet --no-deps --target .venv-peers/newest \
	  gymnax==1.0.1 six==1.17.0
	@touch $@

bench-peers: .venv-peers/.installed
	@$(PY) -m benchmarks env --peers .venv-peers/bin/python
	@$(PY) -m benchmarks ppo --peers .venv-peers/bin/python

lint: .venv/.installed
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

format: .venv/.installed
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: .venv/.installed
	@$(PY) tools/architecture.py
	@$(PY) tools/website.py

# What the notebooks need of torch and Stable-Baselines3 they find in .venv-oracles, where there is one.
.venv-docs/.installed: requirements-docs.lock $(DEAD_DOCS) | .venv/.installed
	@echo "installing what builds the site into .venv-docs (half a minute)"
	@$(PY) -m venv --clear .venv-docs
	@own="$$(.venv-docs/bin/python -c '$(PURELIB)')" && \
	  echo "../../../../$$($(PY) -c '$(PURELIB)')" > "$$own/project.pth" && \
	  .venv-docs/bin/python -m pip install --quiet --no-compile --require-hashes \
	    --requirement requirements-docs.lock && \
	  echo "$$own" | sed 's|^.venv-docs|../../../../.venv-oracles|' >> "$$own/project.pth"
	@touch $@

# Warnings are errors, and tools/website.py forbids the network.
site: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
	@.venv-docs/bin/python -m pytest -q tests/website $(PYTEST_ARGS)
	@echo "build/site/index.html; for its search: $(PY) -m http.server --directory build/site"

NOTEBOOK_ARGS ?=
notebooks: .venv-docs/.installed
	@.venv-docs/bin/python tools/notebooks.py $(NOTEBOOK_ARGS)

bench: .venv/.installed
	@$(PY) -m benchmarks $(BENCH_ARGS)

# One lock for every supported Python, with hashes; uv resolves, pip installs.
lock: .venv/.installed
	@$(PY) -m pip install --quiet uv
	@$(PY) -m uv pip compile pyproject.toml --group dev --universal --generate-hashes --upgrade \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements.lock
	@$(PY) -m uv pip compile pyproject.toml --group oracles --universal --generate-hashes --upgrade \
	  --constraint requirements.lock \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements-oracles.lock
	@$(PY) -m uv pip compile pyproject.toml --group docs --universal --generate-hashes --upgrade \
	  --constraint requirements.lock \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements-docs.lock
	@$(PY) -m uv pip compile pyproject.toml --group peers --torch-backend cpu --upgrade \
	  --constraint requirements.lock \
	  --no-header --no-annotate --no-emit-index-url --quiet --output-file requirements-peers.lock
	@sed -i.old 's/^\(torch==[0-9.]*\)+cpu$$/\1/' requirements-peers.lock && rm requirements-peers.lock.old

wheel: .venv/.installed
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf .venv .venv-newest .venv-oracles .venv-docs .venv-peers build dist .pytest_cache .ruff_cache .hypothesis

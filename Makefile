# make serve      everything from nothing to a served model; prints a curl to try
# make stop       undoes it
# make test       every test that a CPU can run
# make check      lint and types
# make bench      the engine's benchmarks, written to tests/bench/results
# make clean      removes caches and local state (not the environment)
SHELL := /bin/bash
CONFIG ?= ray_config.yaml
PORT ?=
PY := .venv/bin/python

# Every package is checked strictly (pyproject.toml).
MYPY_TARGETS := kvcache router cluster replicas

.PHONY: serve stop test unit check bench clean environment dev-environment

environment:
	@.ci/environment serve

dev-environment:
	@.ci/environment dev

serve: environment
	@$(PY) -m cluster.local serve --config "$(CONFIG)" $(if $(PORT),--port "$(PORT)")

stop:
	@if [ -x $(PY) ]; then $(PY) -m cluster.local stop; else echo "nothing to stop: no environment was made here"; fi

test: dev-environment
	$(PY) -m pytest tests/unit tests/integration

unit: dev-environment
	$(PY) -m pytest tests/unit

check: dev-environment
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(MYPY_TARGETS)

bench: dev-environment
	$(PY) -m tests.bench.engine_bench

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .manta build
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

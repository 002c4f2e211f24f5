# make serve      everything from nothing to a served model; prints a curl to try (CONFIG=file, PORT=8001, TIMEOUT=seconds)
# make stop       undoes it
# make test       every test that a CPU can run
# make check      lint and types
# make bench      the engine's benchmarks, written to tests/bench/results
# make simulate   a short comparison of all routing policies on a made trace (TRACE=file: on that one), picture in build/
# make chaos      kills, hangs and redeploys a cluster of a small model while it streams (ROUNDS=10), report in build/chaos
# make soak       MINUTES=30 of mixed load: does memory grow, is a KV block lost?
# make clean      removes caches and local state (not the environment)
SHELL := /bin/bash
CONFIG ?= ray_config.yaml
PORT ?=
TIMEOUT ?=
ROUNDS ?= 10
MINUTES ?= 30
PY := .venv/bin/python

# Every package is checked strictly (pyproject.toml).
MYPY_TARGETS := kvcache router cluster replicas

# Two processes with one thread each: two threads of each would wait for each other at every barrier. Tests that share a module's
# fixtures stay in one process. What starts Ray runs alone, afterwards.
SLOWEST := --durations=25 --durations-min=2
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest -n 2 --dist loadfile $(SLOWEST)
GOLDEN := tests/integration/test_engine_golden.py

# Made with the statistics of Mooncake's synthetic trace unless TRACE names a file.
MADE_TRACE := build/synthetic.jsonl
TRACE ?= $(MADE_TRACE)

.PHONY: serve stop test unit check bench simulate chaos soak clean environment dev-environment

environment:
	@.ci/environment serve

dev-environment:
	@.ci/environment dev

serve: environment
	@$(PY) -m cluster.local serve --config "$(CONFIG)" $(if $(PORT),--port "$(PORT)") $(if $(TIMEOUT),--timeout "$(TIMEOUT)")

stop:
	@if [ -x $(PY) ]; then $(PY) -m cluster.local stop; else echo "nothing to stop: no environment was made here"; fi

test: dev-environment
	$(PARALLEL) tests/unit $(GOLDEN)
	$(PY) -m pytest tests/integration --ignore=$(GOLDEN) $(SLOWEST)

unit: dev-environment
	$(PARALLEL) tests/unit

check: dev-environment
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(MYPY_TARGETS)

simulate: dev-environment
	@mkdir -p build
	$(if $(filter $(MADE_TRACE),$(TRACE)),$(PY) -m router.simulator.synthesize --kind synthetic --requests 600 --output $(TRACE))
	$(PY) -m router.simulator --trace $(TRACE) --limit 600 --blocks-per-replica 5000 --compare --picture build/simulate.png

bench: dev-environment
	$(PY) -m tests.bench.engine_bench

chaos: dev-environment
	$(PY) -m tests.chaos --rounds $(ROUNDS)
	$(PY) -m tests.chaos --pools --rounds $(ROUNDS) --tokens 150
	$(PY) -m tests.chaos.nodes

soak: dev-environment
	$(PY) -m tests.chaos.soak --minutes $(MINUTES)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .manta build
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

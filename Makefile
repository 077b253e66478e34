# Two commands do everything on a fresh machine: `make demo` and `make test`.
.PHONY: demo demo-tasks test test-all check bench setup site clean
BENCH ?= all

setup:
	@echo "set-up"
	@scripts/setup

demo: setup
	@scripts/python -m demo

# Whole tasks beside next-action learning, each from the base.
demo-tasks: setup
	@scripts/python -m demo.tasks

# Tier 1: laws, contracts, examples, and one real loop. test-all adds kills, both stores, Kafka, clients.
test: TIER = 1
test-all: TIER = 2
test test-all:
	@echo "set-up"
	@scripts/setup tests
	@scripts/python scripts/tests --tier $(TIER)

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/python scripts/lines

# ARGS are options of one benchmark: make bench BENCH=learner ARGS="--small"
bench: setup
	@$(if $(and $(filter all,$(BENCH)),$(ARGS)),$(error ARGS are options of one benchmark; name it by BENCH=))for name in $(or $(filter-out all,$(BENCH)),relay ingest sessions ruler groups learning tasks learner rollback canary sabotage); do benchmarks/$$name/setup || exit 1; done
	@.venv/bin/python -m benchmarks $(BENCH) $(ARGS)

# The documentation site, in .cache/site/html.
site:
	@scripts/site

clean:
	rm -rf .venv .venv-engine .venv-clients .models .cache .demo .sidecar .bench

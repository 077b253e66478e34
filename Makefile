# Two commands do everything on a fresh machine: `make demo` and `make test`.
.PHONY: demo test check setup clean

setup:
	@echo "set-up"
	@scripts/setup

demo: setup
	@.venv/bin/python -m demo

test: setup
	@.venv/bin/python -m pytest

check: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

clean:
	rm -rf .venv .venv-engine .models .cache .demo .sidecar

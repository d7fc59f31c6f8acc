# Needs Python >= 3.11 (with venv) and make; everything else is installed into .venv when a target asks for it.
# Another interpreter: make test PYTHON=python3.13
# Arguments for pytest: make test ARGS="-k reaper -x"

PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest
AT_ONCE := --numprocesses 3 --dist loadgroup # most tests wait for a server most of the time
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint soak format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.demo-installed ## Run examples/orders as a real server and show what duplicates do to it
	@$(BIN)/python -m examples.orders.demo

test: .venv/.dev-installed $(OLDEST)/.installed ## Run the whole test suite, on every server that is found
	@FASTAPI_DEDUP_OLDEST_PYTHON="$(CURDIR)/$(OLDEST)/bin/python" $(BIN)/python -m pytest $(AT_ONCE) $(ARGS)

lint: .venv/.dev-installed ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

soak: .venv/.dev-installed ## Run the tests that take minutes
	@$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)

format: .venv/.dev-installed ## Rewrite the code the way that lint wants it
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## Delete what the other targets made
	rm -rf .venv $(OLDEST) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: an environment is installed into again only when pyproject.toml is newer than its stamp.

.venv/.demo-installed: pyproject.toml
	@echo "Installing what the demo needs into .venv ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) --editable '.[demo]'
	@touch $@

.venv/.dev-installed: pyproject.toml
	@echo "Installing what development needs into .venv ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@ .venv/.demo-installed # dev includes demo

# The oldest versions that pyproject.toml admits, read from there: every `>=` of ours becomes `==`.
define PRINT_FLOORS
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["postgresql"] + extras["psycopg"]:
    print(requirement.replace(">=", "=="))
endef
export PRINT_FLOORS

$(OLDEST)/.installed: pyproject.toml
	@echo "Installing the oldest supported versions into $(OLDEST) ..."
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -c "$$PRINT_FLOORS" > $(OLDEST)/floors.txt
	@$(OLDEST)/bin/python $(PIP_INSTALL) --editable '.[floor-test]' --requirement $(OLDEST)/floors.txt
	@touch $@

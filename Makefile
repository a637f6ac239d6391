# Everything a person or a machine runs on this repository; `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed is named after what was asked for, so a change of either file installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# More flags for `make up` and `make demo`, and for pytest in `make test`.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env up demo demo-model test test-equality test-rdma test-endurance test-page test-compose fuzz-kv check check-format check-lint check-types \
	check-imports check-protos check-docs format protos docs clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

env: $(STAMP)  ## create .venv and install everything, pinned by constraints.txt

up: env  ## run a whole cluster here until Ctrl-C: router, prefill and decode node, Redis
	$(BIN)/python -m pdserve up $(ARGS)

demo: env  ## the same, but stop after one streamed answer
	$(BIN)/python -m pdserve up --exit-after-sample $(ARGS)

demo-model: env  ## fetch and convert the demo model, once
	@$(BIN)/python -c "from pdserve.checkpoints.demo_model import demo_model_folder as folder; print(folder())"

test: env demo-model  ## run the everyday tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-equality: env demo-model  ## the demo model under every policy, order, mode and method
	$(BIN)/python -m pytest tests/equality --every-combination $(ARGS)

test-rdma: env  ## KV over real RDMA verbs, in a small virtual machine with two software devices
	$(BIN)/python -m tests.rdma.vm --timeout 1080

test-endurance: env  ## real clusters under attack, and clusters that shrink under load
	$(BIN)/python -m pytest tests/integration --endurance $(ARGS)

test-page: env  ## the live page in a headless Chromium, which is installed where that is possible
	$(BIN)/python -m tests.page $(ARGS)

test-compose: env  ## images and compose files on a real Docker engine, which is installed where that is possible
	$(BIN)/python -m pytest tests/compose --compose $(ARGS)

fuzz-kv: env  ## a million frames against the KV protocol's decoder and state machines
	$(BIN)/python -m tests.property.kv_transfer.kv_fuzz --frames 1000000

check: check-format check-lint check-types check-imports check-protos check-docs  ## all that is checked without running

check-format: env
	$(BIN)/ruff format --check .

check-lint: env
	$(BIN)/ruff check .

check-types: env
	$(BIN)/mypy .

# Its cache has reported imports that were already removed.
check-imports: env
	$(BIN)/lint-imports --no-cache

check-protos: env
	$(BIN)/python tools/generate_protos.py --check

check-docs: env
	$(BIN)/python tools/generate_metrics_table.py --check
	$(BIN)/python tools/generate_example_file.py --check

format: env  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: env  ## generate the Python stubs of protos/*.proto
	$(BIN)/python tools/generate_protos.py

docs: env  ## write the generated tables of docs/, and pdserve.example.toml
	$(BIN)/python tools/generate_metrics_table.py
	$(BIN)/python tools/generate_example_file.py

clean:  ## remove the environment and every cache of this folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"pdserve needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + \
		": name another one with `make env PYTHON=python3.11`")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[node,cpu,local,keys,otel,dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

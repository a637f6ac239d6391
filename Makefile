# Every command for this repository. `make` without a target lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The name of the stamp has a checksum of both files, so a change of either one installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml requirements.txt | cksum | cut -d' ' -f1)
# Additional flags for `make up` and `make demo`, and for pytest in the `make test…` targets.
ARGS ?=
PINNED_EXTRAS := node cpu gpu rdma local keys otel bench dev
# A run starts hundreds of processes: each would compile the project's sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env up demo demo-model model compiled-kernels test test-quick test-equality test-kernels test-gpu test-examples test-models test-rdma test-endurance test-soak test-upgrade test-clients test-page test-compose test-chart fuzz-kv fuzz-http sbom check check-format check-lint check-types \
	check-imports check-protos check-docs format protos docs pins clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

env: $(STAMP)  ## create .venv with what tests and checks require, with the versions and hashes of requirements.txt

up: env  ## run a whole cluster on this machine until Ctrl-C: router, prefill node, decode node, Redis
	$(BIN)/python -m pdserve up $(ARGS)

demo: env  ## run the same cluster, print one streamed answer, and stop
	$(BIN)/python -m pdserve up --exit-after-sample $(ARGS)

demo-model: env  ## download the demo model, unless it is cached
	@$(BIN)/python -m pdserve.checkpoints.known_models demo

model: env  ## download the model MODEL, unless it is cached, and say what it is: demo or qwen2.5-coder-0.5b
	@$(BIN)/python -m pdserve.checkpoints.known_models $(MODEL)

# Each process collects a file when it is the file's turn, so the number of tests is known at the end.
# A process that dies ends the run: what it had collected is unknown to the others.
BY_FILES := --dist loadfile --max-worker-restart 0 -o console_output_style=classic

# Where no kernels are cached yet, compiling them takes as long as many tests together.
compiled-kernels: env demo-model
	@$(BIN)/python -m tests.support.compiled_kernels

# More processes than two cores can run at once: most integration and contract tests wait most of
# the time, for processes that start, leases that end and peers that are silent.
test: compiled-kernels  ## run the everyday tests, some 10 minutes
	$(BIN)/python -m pytest --numprocesses 6 $(BY_FILES) --durations=15 $(ARGS)

test-quick: env  ## run the unit tests without those of kernels, training and benchmarks
	$(BIN)/python -m pytest --numprocesses 4 $(BY_FILES) tests/unit --quick $(ARGS)

test-equality: compiled-kernels  ## compare the demo model's answers under every scheduling policy, order, mode and draft method
	$(BIN)/python -m pytest tests/equality --every-combination --numprocesses 2 $(ARGS)

test-kernels: compiled-kernels  ## run the GPU kernels in Triton's interpreter, and compile each for three generations of cards; no card is needed
	$(BIN)/python -m pytest tests/gpu_kernels --kernels --numprocesses 2 $(ARGS)

test-gpu: env  ## run and measure the GPU kernels on a card of this machine, some 3 minutes
	$(BIN)/python -m tests.gpu.on_card $(ARGS)

test-models: compiled-kernels  ## test tiny models that are odd, and Qwen2.5-Coder-0.5B-Instruct; skips where its packages cannot be had
	-@$(MAKE) --no-print-directory model MODEL=qwen2.5-coder-0.5b
	$(BIN)/python -m pytest tests/models --models $(ARGS)

test-rdma: env  ## test KV transfer over RDMA verbs, in a small virtual machine with two software devices
	$(BIN)/python -m tests.rdma.vm --timeout 1080

EXAMPLES = tests/property tests/simulation $(shell grep -rl --include='test_*.py' 'tests.support.examples import' tests/unit tests/contract)

test-examples: compiled-kernels  ## run all examples, seeds and points of tests of which make test takes a part: properties, simulations and others
	$(BIN)/python -m pytest --numprocesses 2 $(BY_FILES) --hypothesis-profile=thorough --timeout 600 $(EXAMPLES) $(ARGS)

test-endurance: compiled-kernels  ## test real clusters under faults, and clusters that shrink under load
	$(BIN)/python -m pytest --numprocesses 2 $(BY_FILES) tests/integration tests/contract --endurance $(ARGS)

test-soak: env  ## run a real cluster under mixed load, with one random fault every 20 s, for 5 minutes
	$(BIN)/python -m tests.soak $(ARGS)

test-upgrade: env  ## upgrade a real cluster from the previous release under load, and roll a part of it back
	$(BIN)/python -m tests.upgrade $(ARGS)

test-clients: env demo-model  ## run clients of other projects (anthropic, langchain-openai, instructor, litellm, aiperf, guidellm, lm-eval), each in its own environment
	$(BIN)/python -m tests.clients $(ARGS)

test-page: compiled-kernels  ## test the live page in a headless Chromium, which is installed if possible
	$(BIN)/python -m tests.page $(ARGS)

test-compose: env  ## build the images and run the compose files on a Docker engine, which is installed if possible
	$(BIN)/python -m pytest tests/compose --compose --capture=sys $(ARGS)

test-chart: env  ## render and validate the Helm chart, and test the alert rules, with tools that are fetched if possible
	$(BIN)/python -m pytest tests/chart --chart --capture=sys $(ARGS)

fuzz-kv: env  ## send a million frames to the KV protocol's decoder and state machines
	$(BIN)/python -m tests.property.kv_transfer.kv_fuzz --frames 1000000

fuzz-http: env  ## send a real cluster changed requests of every endpoint for 2 minutes, or ARGS="--minutes 60"
	$(BIN)/python -m tests.fuzz_http $(ARGS)

sbom: env  ## write the bills of materials of the router's and the node's image to build/, as CycloneDX
	@mkdir -p build
	$(BIN)/python -m tools.generate_sbom > build/router.cdx.json
	$(BIN)/python -m tools.generate_sbom --extras node cpu otel > build/node.cdx.json

check: check-format check-lint check-types check-imports check-protos check-docs  ## run every static check: format, lint, types, import rules, generated files

check-format: env
	$(BIN)/ruff format --check .

check-lint: env
	$(BIN)/ruff check .

check-types: env
	$(BIN)/mypy .

# Without its cache, which has reported imports that were already removed.
check-imports: env
	$(BIN)/lint-imports --no-cache

check-protos: env
	$(BIN)/python tools/generate_protos.py --check

check-docs: env
	$(BIN)/python tools/generate_metrics_table.py --check
	$(BIN)/python tools/generate_example_file.py --check

format: env  ## format the code, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: env  ## generate the Python stubs of protos/*.proto
	$(BIN)/python tools/generate_protos.py

docs: env  ## write the generated tables of docs/, and pdserve.example.toml
	$(BIN)/python tools/generate_metrics_table.py
	$(BIN)/python -m tools.generate_profiles
	$(BIN)/python tools/generate_example_file.py

# Keeps the versions that are there while they fit: delete a package's lines to get its newest. Not after
# `env`, which would ask for the new packages first. The index is uv's own or that of UV_DEFAULT_INDEX.
pins:  ## write requirements.txt: versions and hashes of all that pyproject.toml requires
	@test -x $(BIN)/uv || $(MAKE) env
	UV_CUSTOM_COMPILE_COMMAND="make pins" $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url $(PINNED_EXTRAS:%=--extra %) pyproject.toml -o requirements.txt

clean:  ## delete the environment and all caches in this folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is said here goes to stderr: scripts read what `make -s demo-model` prints.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"pdserve needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + \
		": name another one with `make env PYTHON=python3.11`")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python tools/requirements.py --extras node cpu gpu local keys otel dev > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r $(VENV)/requirements.txt >&2
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat -e . >&2
	@rm -f $(VENV)/.installed-*
	@touch $@

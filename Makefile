# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The wheels that a machine keeps locally, if it says so; uv does not read pip's setting.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# One thread per process: the processes share the cores, and OpenMP threads that spin on them
# make everything slower.
export OMP_NUM_THREADS ?= 1
# So many processes run tests beside each other; who has run out takes over what waits elsewhere.
# As many as a small machine has cores: tests compute, and one process more costs a seventh.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal

.PHONY: quickstart vllm test test-slow coverage check style lock clean

quickstart: $(VENV)/.run  ## Install, then train the quickstart recipe to its level
	$(BIN)/rlinf train quickstart

vllm: $(VENV)/.dev  ## Beside the rest: vLLM for the CPU, without what a CPU build of torch cannot load
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override overrides.in -e '.[vllm]'

# Types are checked beside the tests, which leave a core idle where they wait for a process.
test: style  ## Install, then check types, style and layers and run the tests
	@said=$$(mktemp); nice $(BIN)/mypy >$$said 2>&1 & types=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$types; types=$$?; cat $$said; rm $$said; exit $$((tests | types))

test-slow: $(VENV)/.dev  ## The tests that take longer: kill and resume, fault storms
	$(BIN)/pytest -m slow --timeout 1800

coverage: $(VENV)/.dev  ## What the tests run through; watching every line makes them half as slow again
	$(PYTEST) --cov=rlinf --cov-report=term

check: style
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

lock: $(VENV)/.dev  ## Renew the pinned versions
	$(BIN)/uv pip compile -q pyproject.toml -c constraints.in --extra ray --extra metaworld --extra language --extra lerobot --extra serve --extra dev \
		--no-emit-find-links --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
		| sed 's/+cpu$$//' > requirements.lock
	for name in $$(ls rlinf/envs/locks | sed 's/.txt//'); do \
		$(BIN)/rlinf env lock $$name > rlinf/envs/locks/$$name.txt; done

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.run: pyproject.toml requirements.lock | $(BIN)/uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c requirements.lock -e '.[metaworld]'
	$(BIN)/python -m compileall -q rlinf
	touch $@

$(VENV)/.dev: pyproject.toml requirements.lock | $(BIN)/uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c requirements.lock -e '.[metaworld,ray,language,lerobot,serve,dev]'
	$(BIN)/python -m compileall -q rlinf
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

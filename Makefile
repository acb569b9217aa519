# The verbs of the project. `make demo` and `make test` need Python 3.11 or newer with venv, and nothing else:
# they make their environment in .venv beside this file, once, and again when pyproject.toml or constraints.txt change.
#
#   make demo PYTHON=python3     uses that interpreter and its packages as they are, and makes no environment
#
# Packages come from wherever pip is configured to look. Where that offers CPU builds of torch, one is taken
# (torch==2.13.0+cpu meets the pin and sorts above torch==2.13.0); elsewhere it is the default build, which uses a GPU.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-outside test-processors test-gpu test-machines test-faults lint types fmt schema docs clean

ifeq ($(origin PYTHON), undefined)
PYTHON := .venv/bin/python
READY := .venv/installed
endif

help:  ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20

demo: $(READY)  ## train a tiny model by SFT and GRPO in emulated FP8, and print a table (6 to 13 minutes on two CPU cores)
	$(PYTHON) -m octetrl demo

test: export PYTHONDONTWRITEBYTECODE =  # a hundred processes would compile the package anew
test: lint  ## lint, types (beside the tests, shown last) and all tests that need no GPU, in JOBS=3 processes
	@bash setup/bubblewrap.sh || true
	@mkdir -p build; $(PYTHON) -m mypy >build/types.txt 2>&1 & beside=$$! failed=0; \
	$(PYTHON) -m pytest -n $(or $(JOBS),3) --dist worksteal --durations=25 --durations-min=5 -m "not gpu and not machines" || failed=$$?; \
	wait $$beside || failed=$$?; echo "$(PYTHON) -m mypy"; cat build/types.txt; exit $$failed

test-outside: $(READY)  ## the tests against packages that the project does not depend on, in build/outside (about 4 GB)
	@bash setup/outside_packages.sh $(PYTHON)

test-processors: $(READY)  ## the numeric tests as on five processors; SETTING=n runs one of them; in JOBS=3 processes
	@bash setup/processors.sh $(PYTHON) -n $(or $(JOBS),3) --dist worksteal

test-gpu: $(READY)  ## the tests that need a Hopper GPU, in JOBS=6 processes a GPU on all GPUs; fails without one
	OCTETRL_REQUIRE=gpu $(PYTHON) -m pytest -n $$(($(or $(JOBS),6) * $$($(PYTHON) -m tests.gpu_order))) --dist loadgroup -m gpu

test-machines: $(READY)  ## runs on three machines, which are network namespaces of this one: needs root
	OCTETRL_REQUIRE=machines $(PYTHON) -m pytest -m machines --durations=0

test-faults: $(READY)  ## run 1,000 agents; strain boxes; kill a run on several workers at MOMENTS=20 random moments; SEED=n repeats those of a run
	$(PYTHON) -m tests.e2e.many_agents
	$(PYTHON) -m tests.e2e.many_boxes
	$(PYTHON) -m tests.e2e.faults --moments $(or $(MOMENTS),20) $(if $(SEED),--seed $(SEED))

lint: $(READY)  ## ruff's rules
	$(PYTHON) -m ruff check .

types: $(READY)  ## mypy over the package and lab/
	$(PYTHON) -m mypy

fmt: $(READY)  ## rewrite the code as ruff formats it
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

schema: $(READY)  ## rewrite recipes/recipe.schema.json and octetrl/api/fields.py, which editors read, and the table of families in docs/models.md
	$(PYTHON) -m octetrl.config.recipe_page
	$(PYTHON) -m lab.families_page

docs: $(READY)  ## build the site of docs/ into build/site/; a warning is an error
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

clean:  ## remove the environment and everything that tools left behind; runs/ stays
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt setup/make_environment.sh
	@bash setup/make_environment.sh .venv
	@touch $@

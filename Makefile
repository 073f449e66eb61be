PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: format models lint types test test-long test-gpu aot aot-subset bench docs handbook screenshots check

format: ## rewrite the sources in the house style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

models: ## the default model and scorer, which tests of whole runs need; fetched once
	$(PYTHON) -m cocktail.cli models pull smollm2-135m-instruct
	$(PYTHON) -m cocktail.cli models pull minilm

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-long: ## what takes minutes, such as all random cases of peak memory against plan
	$(PYTHON) -m pytest -m long

test-gpu: ## the tests that need a CUDA device
	$(PYTHON) -m pytest -m gpu

aot: ## compiles every Triton kernel for every architecture, without a card, and writes docs/kernels.md
	$(PYTHON) -m cocktail.kernels.aot --jobs 2 --write docs/kernels.md

aot-subset: ## compiles the part of them that CI checks
	$(PYTHON) -m cocktail.kernels.aot --jobs 2 --subset

bench: ## one question about the handbook, with its times and bytes
	$(PYTHON) -m cocktail.cli ask examples/handbook.pdf "Which environment variable does the same as --password?" --stats --no-cache

handbook: ## examples/handbook.pdf from docs/handbook/
	$(PYTHON) docs/build_handbook.py

screenshots: ## docs/screenshots/ from real runs with the default model
	$(PYTHON) docs/build_screenshots.py

docs: handbook ## everything under docs/ that is generated
	$(PYTHON) docs/generate_cli.py
	$(PYTHON) docs/generate_fits.py

check: models lint types aot-subset test ## what CI runs; the tests also fail on stale documents

# Everything a newcomer needs: `make serve`. GNU make, Python 3.11+ and its venv module are the only requirements.
MODEL ?=
HOST ?=
PORT ?=
DEVICE ?=
ARGS ?=
BIN := .venv/bin
# An editable install holds absolute paths, so a checkout that moved needs its environment made again.
ifneq ($(shell cat .venv/.made-in 2>/dev/null),$(CURDIR))
STALE := stale
endif

.DEFAULT_GOAL := help
.PHONY: help install serve doctor test lint bench clean stale

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
	  printf '  make %-9s %s\n' "$$name" "$$text"; done

serve: .venv/.base  ## start the server [MODEL=name or path] [HOST=..] [PORT=..] [DEVICE=cpu] [ARGS="--max-batch 4"]
	@exec $(BIN)/graphrt serve $(if $(MODEL),"$(MODEL)") $(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") \
	  $(if $(DEVICE),--device "$(DEVICE)") $(ARGS)

doctor: .venv/.base  ## what this machine has and lacks, with the command that gets it
	@$(BIN)/graphrt doctor

test: lint  ## lint, then every test that this machine can run [ARGS="-k name"]
	@$(BIN)/python -m pytest --durations=15 --durations-min=1 $(ARGS)

lint: .venv/.dev  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: .venv/.dev  ## speed beside transformers, and the seam's latency, into perf/results (minutes; wants a quiet machine)
	@$(BIN)/python -m graphrt.perf.bench_cpu --out perf/results/cpu-smollm2.json
	@$(BIN)/python -m graphrt.perf.bench_seam --out perf/results/seam.json

install: .venv/.base  ## only make .venv and install graphrt there [PYTHON=python3.12] [CUDA=0]
	@echo "graphrt is installed: $(BIN)/graphrt --help"

.venv/.base: pyproject.toml $(STALE)
	@.ci/venv base

.venv/.dev: .venv/.base
	@.ci/venv dev

clean:  ## remove .venv and all caches in this folder (models stay)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Two commands: `make demo` and `make test`. Both make the environment (.venv) first, if it is not there or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEXT := $(addprefix flower/test_,exchange.py strategy.py hooks.py roster.py plug.py remote.py) $(addprefix deploy/test_,gate.py fleet.py desk.py)
unexport PYTHONDONTWRITEBYTECODE # tests start many processes: none should compile the package again

.PHONY: help docs demo test flower hostile containers image lint types unit slow test-all install clean audit soak flower-all flower-next deployed gpu
help:
	@echo "make demo    FedMAP against FedAvg and local training on label-skewed data"
	@echo "make test    style, types and tests (seven minutes on two cores)"
	@echo "make test-all  the same and the slow tests: every method on every network"
	@echo "make flower  the tests that start Flower's own programs (about ten minutes)"
	@echo "make image   the container image, bayflower:VERSION"
	@echo "make containers  the tests that start containers (root and a Docker engine; about twenty minutes)"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make deployed  bayflower deploy as processes over TLS, a Ray cluster, the examples in a fresh environment (about fifteen minutes)"
	@echo "make flower-all  every method in Flower's simulation and as processes, with the bits of the loop (about ten minutes)"
	@echo "make flower-next  the same strategies, messages and gate under the newest Flower that is supported (minutes)"
	@echo "make hostile ten thousand mutated replies against every strategy, ten thousand requests against gate and SuperLink (minutes)"
	@echo "make soak    five hundred rounds with flat memory (minutes)"
	@echo "make gpu     all that only a GPU shows: tests, races, overheads, networks, in runs/gpu (half an hour; DATA=folder of fmnist.npz, shakespeare.txt)"
	@echo "make audit   known weaknesses of the packages in the image (pip-audit, where it reaches a database)"
	@echo "make clean   remove the environment and caches"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $$($(PYTHON) --version) found; set PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes two to three minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,simulation]"
	@touch $@

demo: $(READY)
	@echo "FedMAP, FedAvg and local training on ten clients, five of them with skewed labels; Flower's simulation (flwr run .), about two minutes"
	@$(BIN)/bayflower compare fedmap fedavg local --engine ray --app . --dataset synthetic --set scenario=label --rounds 20 --out runs/demo --overwrite

# mypy has one thread: it runs beside the tests
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit

test-all: test slow

flower: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower/test_flower.py tests/flower/test_flower_faults.py -m flower -n 2 --dist worksteal $(CHOSEN)

# without its dependencies: the certifi that it asks for is not on every package index
flower-next: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/next flwr==1.42.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VENV)/next $(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix tests/,$(NEXT))
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VENV)/next $(BIN)/python -m pytest -m flower tests/flower/test_flower.py -k as_a_user_types_it

deployed: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy/test_deploy_processes.py tests/deploy/test_gate_processes.py tests/regions/test_tree_processes.py tests/flower/test_ray_cluster.py tests/cli/test_examples.py tests/cli/test_docs.py -m flower

DATA ?= data
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py runs/gpu --data-dir $(DATA)
	$(BIN)/python benchmarks/gpu.py runs/gpu --page

flower-all: $(READY)
	BAYFLOWER_ALL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower/test_flower.py -m flower -k "bits_of_the_loop" -n 2

hostile: $(READY)
	BAYFLOWER_TRIALS=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower/test_hostile.py -k mutated -m "slow or not slow" -n auto --maxprocesses 4
	BAYFLOWER_TRIALS=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/deploy/test_fleet.py tests/deploy/test_gate_processes.py -k mutated -m "flower or not flower"

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower/test_soak.py -m soak -s

# pip's own settings reach the build as a secret; with BAYFLOWER_TORCH_LINKS= (empty) torch comes from the same index as the rest
image:
	docker build --quiet -f docker/Dockerfile -t bayflower:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
	  $${BAYFLOWER_PIP_CONF:+--secret id=pip,src=$$BAYFLOWER_PIP_CONF} $${BAYFLOWER_TORCH_LINKS+--build-arg TORCH_LINKS=$$BAYFLOWER_TORCH_LINKS} \
	  $${BAYFLOWER_BASE:+--build-arg BASE=$$BAYFLOWER_BASE} .

# known weaknesses of what the image has; without an advisory database it says so and goes on
audit: $(READY)
	@PYTHONPATH=$(VENV)/audit $(BIN)/python -m pip_audit --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/audit pip-audit 2>/dev/null || true
	@if ! PYTHONPATH=$(VENV)/audit $(BIN)/python -m pip_audit --version >/dev/null 2>&1; then echo "pip-audit: left out, because it is not installed here and no index has it"; else \
	  said=$$(PYTHONPATH=$(VENV)/audit timeout 120 $(BIN)/python -m pip_audit --disable-pip --no-deps -r docker/requirements.lock 2>&1); code=$$?; \
	  unknown=$$(echo "$$said" | grep -c "could not be audited"); \
	  if echo "$$said" | grep -q "known vulnerabilit" && [ $$code != 0 ]; then echo "$$said"; exit $$code; \
	  elif [ $$code != 0 ]; then echo "pip-audit: left out, because no advisory database can be reached from here"; \
	  elif [ $$unknown != 0 ]; then echo "pip-audit: the advisory database that is reached from here does not know $$unknown packages"; else echo "$$said"; fi; fi

containers: $(READY) image
	$(BIN)/python -m pytest tests/deploy/test_containers.py tests/regions/test_tree_containers.py -m containers $(CHOSEN)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n auto --maxprocesses 4 --dist worksteal || [ $$? = 5 ] # 5: there are none

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

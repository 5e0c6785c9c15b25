# Two commands are enough on a new machine: `make demo` trains a model, `make test` runs all tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CRD    := charts/ddpjob-operator/crds/ddpjobs.training.ddpjob.io.yaml
DASHBOARDS := charts/ddpjob-operator/files/dashboards
# If this variable is set, each of the thousand processes of the tests compiles all sources, a fifth of the time.
unexport PYTHONDONTWRITEBYTECODE
# Three pytest processes for two cores, because many tests wait. tests/conftest.py lists the tests that share a process.
WORKERS ?= $(shell echo $$(($$(nproc) * 3 / 2)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: dist install demo quick test-processes test test-long test-versions test-frameworks docs pictures pictures-check simulate truth test-kind check format generate pins clean help

help: ## What can be made.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/installed ## The virtual environment with everything that demo and test need.

$(VENV)/installed: $(VENV)/trains
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[trainer,examples,operator,dev]'
	@touch $@

# Install what a first job needs, without the operator's packages and the tools of the tests.
$(VENV)/trains: pyproject.toml constraints.txt
	@echo "installing PyTorch and DDPJob into $(VENV); this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[trainer,examples]'
	@touch $@

demo: $(VENV)/trains ## Train a model on two local nodes.
	$(BIN)/ddpjob run examples/digits.yaml

check: install ## Check style, types, layers, and that generated files are up to date.
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/pod_types.py | diff -u operator/ddpjob_operator/job/pod_types.py - || (echo "make generate"; exit 1)
	$(BIN)/ddpjob crd | diff -u $(CRD) - || (echo "the CRD differs from the types: make generate"; exit 1)
	$(BIN)/python tools/reference_page.py | diff -u docs/reference.md - || (echo "make generate"; exit 1)
	$(BIN)/python tools/messages_page.py | diff -u docs/messages.md - || (echo "make generate"; exit 1)
	$(BIN)/python tools/check_page.py | diff -u docs/check.md - || (echo "make generate"; exit 1)
	$(BIN)/python tools/environment_page.py | diff -u docs/environment.md - || (echo "make generate"; exit 1)
	$(BIN)/ddpjob schema | diff -u docs/ddpjob.schema.json - || (echo "make generate"; exit 1)
	$(BIN)/python tools/metrics_page.py | diff -u docs/metrics.md - || (echo "make generate"; exit 1)
	@for name in fleet job; do $(BIN)/python tools/dashboards.py ddpjob-$$name | diff -u $(DASHBOARDS)/ddpjob-$$name.json - \
	  || { echo "make generate"; exit 1; }; done

quick: check ## Style, types, and the tests that start no process but helm: a few minutes.
	$(PYTEST) --quiet -m "not long" tests/unit tests/property tests/simulation tests/chart

test-processes: install ## The tests that start processes: ddpjob, ddprun, local runs, the library with torch.
	$(PYTEST) -m "not long" --durations 25 tests/processes tests/agent tests/local tests/trainer tests/truth tests/metrics

test: quick test-processes ## All tests; those that need a cluster run where KUBECONFIG names one, and those that break it one after the other.
	$(PYTEST) -m "not long and not alone" --durations 25 tests/api
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long and not alone" --durations 25 tests/cluster
	$(BIN)/python -m pytest -n 0 -m "not long and alone" --durations 25 tests/api tests/cluster

test-long: install ## Run the tests with hundreds of other seeds and settings; takes hours.
	$(PYTEST) -m long --durations 25 --ignore tests/api --ignore tests/cluster
	$(BIN)/python -m pytest -n 0 -m long --durations 25 tests/api tests/cluster
	$(PYTEST) --quiet --hypothesis-profile night --timeout 1800 tests/property

test-versions: install ## The library's and ddprun's tests with each Python from 3.10 on that is here, torch 2.4 and the newest (gigabytes).
	$(BIN)/python tests/versions.py

test-frameworks: install ## The examples with Hugging Face, Accelerate and Lightning, which it installs (220 MB).
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[frameworks]'
	$(BIN)/python -m pytest -n 0 tests/local/test_frameworks.py

docs: install ## The documents as a site in site/, whose pages load nothing from elsewhere.
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site

dist: install ## Wheel, sdist, chart and lists of the images' packages (CycloneDX) in dist/; two builds of a commit are equal.
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dist]'
	rm -rf dist
	$(BIN)/python tools/dist.py dist

pictures: install ## The terminal pictures of README, from a real run; needs tmux.
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/elastic_picture.py

pictures-check: install ## Check that these pictures equal a new run, except for numbers; needs tmux.
	$(BIN)/python tools/pictures.py --check

SEEDS ?= 20000
simulate: install ## Simulate SEEDS=20000 jobs in a model of a cluster, with random faults.
	$(BIN)/python tests/simulation/simulate.py --seeds $(SEEDS)

N ?= 500
truth: install ## Draw N=500 training scripts and kill their runs: the result must be equal, or a message names the difference.
	$(BIN)/python tests/truth/search.py --draws $(N)

test-kind: install ## The tests that need a cluster, on a kind cluster of two nodes (docker, kind, kubectl and helm on the PATH).
	printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes: [{role: control-plane}, {role: worker}, {role: worker}]\n' \
	  | kind create cluster --name ddpjob-test --config -
	docker build --build-arg PYTHON_IMAGE=$$(cat pins/python-image.txt) --target operator -t ddpjob-operator:0.1.0 .
	docker build --build-arg PYTHON_IMAGE=$$(cat pins/python-image.txt) --target trainer -t ddpjob-trainer:latest .
	kind load docker-image --name ddpjob-test ddpjob-operator:0.1.0 ddpjob-trainer:latest
	kind get kubeconfig --name ddpjob-test > $(VENV)/kind.kubeconfig
	KUBECONFIG=$(VENV)/kind.kubeconfig $(BIN)/python -m pytest -n 0 -m "not long" tests/api tests/cluster; \
	  result=$$?; kind delete cluster --name ddpjob-test; rm -f $(VENV)/kind.kubeconfig; exit $$result

format: install ## Bring the code into shape.
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

generate: install ## Write the CRD and the reference from the types.
	$(BIN)/python tools/pod_types.py > operator/ddpjob_operator/job/pod_types.py
	$(BIN)/ddpjob crd > $(CRD)
	$(BIN)/python tools/reference_page.py > docs/reference.md
	$(BIN)/python tools/messages_page.py > docs/messages.md
	$(BIN)/python tools/check_page.py > docs/check.md
	$(BIN)/python tools/environment_page.py > docs/environment.md
	$(BIN)/ddpjob schema > docs/ddpjob.schema.json
	$(BIN)/python tools/metrics_page.py > docs/metrics.md
	for name in fleet job; do $(BIN)/python tools/dashboards.py ddpjob-$$name > $(DASHBOARDS)/ddpjob-$$name.json; done

pins: install ## Write pins/*.txt, the hashes of what the images install: after a change of constraints.txt (minutes).
	$(BIN)/python tools/pins.py

clean: ## Remove what was made here.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

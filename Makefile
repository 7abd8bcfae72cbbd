# Everything a fresh machine needs is made here: a virtual environment with pinned versions, then the work itself.
#
#   make demo     bench the digits workload and check the text workload, under ten layouts on two processes, and write
#                 report.html
#   make test     the test-suite, in minutes
#   make test-integrations   real starts of what others make: Slurm, MPI, Ray (installed where that is allowed), Horovod
#                            (built the first time, in minutes), hosts; and benches, the wheel, a notebook
#   make test-at-length      what checks one thing many times: recipes, layouts on 8 ranks, their mutations, models of all
#                            kinds, transformers, faults
#   make test-integrations PART=slurm   one part, of either: horovod slurm mpi ray hosts launchers (spawn, torchrun),
#                            libraries (Accelerate, Fabric), benches, package (wheel, notebook, site); recipes (beside the library, with their mutations, and by
#                            their own commands), models (odd ones, transformers), layouts (8 ranks, experts, simulations,
#                            dropout, own code, parameter servers; their traffic, their mutations), suite (what is marked
#                            beside the other tests)
#   make test-parts         both of them in one run, as CI does: tests that wait for launchers run beside those that compute
#   make test-versions   the built wheel under Python 3.11, 3.13 and 3.14 with torch 2.11, 2.13, 2.14 and 2.15, as far
#                            as this machine can have them (each pair installs its own torch); prints what is missing and why
#   make check    format, lint, types, and the test-suite
#   make docs     the documentation as a site, in build/docs/site; a link that leads nowhere ends it
#
# Without an NVIDIA GPU, PyTorch's own site has smaller wheels: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := horovod slurm mpi ray hosts launchers libraries benches package
AT_LENGTH := recipes models layouts suite
# a test mostly waits for its ranks: three workers leave a fifth of two cores idle. 0: one test after the other, in one process
WORKERS ?= 4
PIP_OPTIONS := --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
INSTALL ?= $(BIN)/python -m pip install $(PIP_OPTIONS)

.PHONY: demo test test-integrations test-at-length test-parts test-versions check lint types docs clean

demo: $(VENV)/installed
	$(BIN)/everyrank bench digits --processes 2 --layout single ddp zero1 fsdp local_sgd parameter_server --json digits.json
	$(BIN)/everyrank verify text --set experts=4 batch=8 --quick --processes 2 --layout tensor context expert pipeline --json text.json
	@$(BIN)/everyrank report digits.json text.json --html report.html > /dev/null
	@echo "wrote report.html. Next: . $(BIN)/activate; everyrank audit YOUR_SCRIPT.py, or follow docs/start.md"

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --ignore tests/integration -m "not integration" --numprocesses $(WORKERS) --dist loadfile

ifneq ($(filter-out $(INTEGRATIONS) $(AT_LENGTH),$(PART)),)
$(error PART=$(PART): give one of $(INTEGRATIONS) $(AT_LENGTH))
endif
RUN_PARTS = $(BIN)/python -m pytest tests/integration tests -m integration -rs --numprocesses $(WORKERS) --dist loadgroup --parts

test-integrations: $(VENV)/installed-integrations
	tests/integration/install
	tests/integration/install_horovod $(BIN)/python
	$(RUN_PARTS) "$(or $(PART),$(INTEGRATIONS))"

test-parts: $(VENV)/installed-integrations
	tests/integration/install
	tests/integration/install_horovod $(BIN)/python
	$(RUN_PARTS) "$(INTEGRATIONS) $(AT_LENGTH)"

test-at-length: $(VENV)/installed-dev
	$(RUN_PARTS) "$(or $(PART),$(AT_LENGTH))"

test-versions: $(VENV)/installed-dev
	$(BIN)/python tests/try_versions.py $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

check: lint types test

docs: $(VENV)/installed-docs
	$(BIN)/python docs/build_site.py
	$(BIN)/python docs/habits.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/basedpyright

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("everyrank needs Python 3.11 or newer; this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e '.[html]'
	@touch $@

# in one call of pip, which takes many seconds to look at all that is there already
$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e '.[html,dev,docs]'
	@touch $(VENV)/installed $(VENV)/installed-docs $@

$(VENV)/installed-integrations: $(VENV)/installed-dev
	$(INSTALL) -c constraints.txt -e '.[html,dev,docs,mpi,ray,benchmarks]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e '.[html,docs]'
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) .versions build dist report.html digits.json text.json runs

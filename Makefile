# Each target sets up what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
# `make wheelhouse PYTHON=3.12` names the target machine's Python; this machine's stays python3.
ifneq ($(filter 3.%,$(PYTHON)),)
TARGET_PYTHON := $(PYTHON)
override PYTHON := python3
endif
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   ?= out/demo

export TORCHAO_FORCE_SKIP_LOADING_SO_FILES ?= 1
# Two test processes on two cores: more threads would only wait for each other, in loops that burn both cores.
test: export OMP_NUM_THREADS ?= 1
test: export OPENBLAS_NUM_THREADS ?= 1

.PHONY: install demo test check format wheelhouse clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fp8parity needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,hf,mlflow,tensorboard,tokenizers,test,lint]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fp8parity run recipes/demo_cpu.yaml --out $(DEMO) --any-verdict

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# For a machine without a network: docs/offline-install.md. ARCH, GLIBC, EXTRAS, WITH_TORCH=1 as there.
EXTRAS ?= train
wheelhouse: $(STAMP)
	$(BIN)/python tools/wheelhouse.py --extras '$(EXTRAS)' $(if $(TARGET_PYTHON),--python $(TARGET_PYTHON)) \
	  $(if $(ARCH),--arch $(ARCH)) $(if $(GLIBC),--glibc $(GLIBC)) $(if $(WITH_TORCH),--with-torch)

clean:
	rm -rf $(VENV) out build dist

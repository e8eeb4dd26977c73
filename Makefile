# Everything runs in a virtual environment of its own: make test VENV=/tmp/v PYTHON=python3.12
VENV ?= .venv
PYTHON ?= python3

.PHONY: test demo check
test:
	@scripts/setup "$(VENV)" "$(PYTHON)" test
	@VENV="$(VENV)" scripts/test

demo:
	@scripts/setup "$(VENV)" "$(PYTHON)" demo,cli
	@"$(VENV)/bin/retrysafe" demo

check:
	@scripts/setup "$(VENV)" "$(PYTHON)" test
	@VENV="$(VENV)" scripts/check

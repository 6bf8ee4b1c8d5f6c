# Everything from a clean clone: `make demo` shows the package at work, `make test` proves it, `make
# lint` reads it.
#
# All of it happens in .venv, with the versions that requirements.txt pins, and in Cargo's target
# folder. Needed beforehand: Rust (1.88 or newer), Python (3.10 or newer), a C++ compiler. The first
# run fetches torch and compiles its Rust bindings, some minutes; later runs redo only what changed.
#
# Builds with torch use the release profile throughout, so that wheel, tests and lints share one
# compiled torch-sys.

PYTHON := $(shell command -v python3.11 || command -v python3)
BIN := $(CURDIR)/.venv/bin
TORCH := --release --features torch

# torch-sys asks the first `python` for libtorch: see build.rs.
export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(BIN):$(PATH)
export LIBTORCH_USE_PYTORCH := 1

# Threads that wait by spinning slow one another down wherever two programs share the cores.
export OMP_WAIT_POLICY := passive

TESTED_WITH_OLDEST := accelerate arrow examples hf_attention hf_trainer lightning resume_hf \
	torchdata torchrun trl versions workers

SOURCES := Cargo.toml Cargo.lock build.rs setup.py pyproject.toml \
	$(shell find src cpp -type f)

.PHONY: demo build test test-resume test-min test-page lint bench bench-peers docs tools
.DELETE_ON_ERROR:

demo: build
	multipack demo

build: .venv/multipack.stamp

test: build
	cargo test
	cargo test $(TORCH)
	cargo bench -- --test
	python -m pytest

# Every combination of settings, of which `test` runs pairs: some minutes.
test-resume: build
	MULTIPACK_RESUME=all python -m pytest tests/python/test_resume*.py

# The integrations with the oldest libraries that they work with.
test-min: build .venv-min/requirements.stamp
	.venv-min/bin/python -m pytest $(TESTED_WITH_OLDEST:%=tests/python/test_%.py)

# The page of `multipack report` in a browser: needs Chromium, and fails without it.
test-page: build
	python -m pytest tests/browser

lint: .venv/requirements.stamp
	cargo fmt --check
	clang-format --dry-run --Werror $(shell git ls-files '*.cpp' '*.h')
	cargo clippy --all-targets -- -D warnings
	cargo clippy --all-targets $(TORCH) -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps $(TORCH)
	ruff check
	ruff format --check
	mypy

bench: build
	cargo bench --bench plan --bench batch
	python benches/python/plan_peers.py
	python benches/python/attention_peers.py
	python benches/python/attention_peers.py --step
	python benches/python/loader.py
	python benches/python/balance_peers.py
	python benches/python/batch_peers.py
	# Last, for it fails where doubling the samples costs too much, which would end the others.
	cargo bench --bench scaling

# All comparisons with others in one run, as docs/peers.md: a quarter of an hour on idle cores.
bench-peers: build .venv/peers.stamp
	PYTHONPATH=$(CURDIR)/.venv/peers python benches/python/peers.py

# The reference, from the docstrings: build/docs, and target/doc for Rust.
docs: build .venv/docs.stamp
	# pdoc does not find what the fields of named tuples refer to.
	python -W error::UserWarning -W "ignore:Error parsing type annotation ForwardRef" \
		-m pdoc --docformat google --output-directory build/docs \
		multipack multipack.ops multipack.integrations $(addprefix multipack.integrations., \
		accelerate axolotl hf lightning torchdata trl)
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps $(TORCH)

.venv/multipack.stamp: .venv/requirements.stamp $(SOURCES)
	@echo "Compiling the library (the first time takes some minutes)"
	python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

# It sees the packages of .venv behind its own, and this package where it lies.
.venv-min/requirements.stamp: requirements-min.txt .venv/requirements.stamp
	test -x .venv-min/bin/python || python -m venv --without-pip .venv-min
	printf '%s\n' $(CURDIR)/.venv/lib/python*/site-packages $(CURDIR)/torch_ext \
		> $$(echo .venv-min/lib/python*/site-packages)/shared.pth
	.venv-min/bin/python -m pip install --quiet --requirement $<
	touch $@

.venv/requirements.stamp: requirements.txt | tools
	@echo "Installing torch and the rest of requirements.txt into .venv (some gigabytes)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	python -m pip install --quiet --requirement requirements.txt
	touch $@

.venv/docs.stamp: docs/requirements.txt .venv/requirements.stamp
	python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

.venv/peers.stamp: benches/python/requirements.txt .venv/requirements.stamp
	rm -rf .venv/peers
	python -m pip install --quiet --no-deps --ignore-requires-python --target .venv/peers \
		--requirement benches/python/requirements.txt
	touch $@

tools:
	@command -v cargo > /dev/null || \
		{ echo "multipack needs Rust 1.88 or newer: install it from https://rustup.rs" >&2; exit 1; }
	@command -v c++ > /dev/null || \
		{ echo "multipack needs a C++ compiler: install g++ or clang" >&2; exit 1; }
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "multipack needs Python 3.10 or newer, with its venv module" >&2; exit 1; }

# Everything from a clean clone: `make demo` shows the package at work, `make test` proves it, `make
# lint` reads it, `make wheel` leaves a wheel in dist, and `make test-wheel` tests that.
#
# All of it happens in .venv, with the versions that requirements.txt pins, and in Cargo's target
# folder. Needed beforehand: Rust (1.88 or newer), Python (3.10 or newer), a C++ compiler. The first
# run fetches torch and compiles its Rust bindings, some minutes; later runs redo only what changed.
#
# With another torch, as in `make test TORCH=2.14`, all of it happens in .venv-torch2.14, and what
# is tested is the wheel installed there, while .venv has the source folder itself.
#
# Builds with torch use the release profile throughout, so that wheel, tests and lints share one
# compiled torch-sys.

PYTHON := $(shell command -v python3.11 || command -v python3)
VENV := $(if $(TORCH),.venv-torch$(TORCH),.venv)
BIN := $(CURDIR)/$(VENV)/bin

# Cargo where it needs torch.
CARGO := python libtorch.py cargo
FEATURES := --release --features torch

export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(BIN):$(PATH)
ifdef TORCH
export CARGO_TARGET_DIR := $(CURDIR)/$(VENV)/target
endif

# Threads that wait by spinning slow one another down wherever two programs share the cores.
export OMP_WAIT_POLICY := passive

TESTED_WITH_OLDEST := accelerate arrow collate_samples dataset examples hf_attention \
	hf_checkpoints hf_refusals hf_stream hf_trainer lightning plan plan_files plan_inputs plan_orders \
	resume_hf torchdata torchrun trl versions workers

SOURCES := Cargo.toml Cargo.lock build.rs libtorch.py setup.py pyproject.toml \
	$(shell find src cpp -type f)
PACKAGE := $(shell find torch_ext -name '*.py' -o -name '*.html')

.PHONY: demo build test test-core test-rust test-python test-resume test-min test-page \
	test-install test-sources test-wheel test-pythons lint lint-core lint-torch lint-tools bench \
	bench-peers docs wheel fuzz fuzz-coverage miri sanitize sanitize-threads tools
.DELETE_ON_ERROR:

demo: build
	multipack demo

build: $(VENV)/multipack.stamp

test: test-core test-rust test-python

# No torch, and so nothing in .venv.
test-core: | tools
	cargo test
	cargo bench -- --test

test-rust: $(VENV)/requirements.stamp
	$(CARGO) test $(FEATURES)

test-python: build
	python -m pytest

# Every combination of settings, of which `test` runs pairs: some minutes.
test-resume: build
	MULTIPACK_RESUME=all python -m pytest tests/python/test_resume*.py

# The integrations with the oldest libraries that they work with. Where several processes train on
# the CPU, transformers before 5.18 reads an optimizer back to the device cpu:0, unknown to torch.
test-min: build .venv-min/requirements.stamp
	ACCELERATE_TORCH_DEVICE=cpu .venv-min/bin/python -m pytest $(TESTED_WITH_OLDEST:%=tests/python/test_%.py)

# The page of `multipack report` in a browser: needs Chromium, and fails without it.
test-page: build
	python -m pytest tests/browser

# The commands of README.md and docs/ that install the package, in a new environment: some minutes.
test-install: build
	python -m pytest tests/install

# Random cases by the thousand: TIME seconds in all, from case SEED on or from any. Ten minutes for
# each target are TIME=3900 on two cores.
TIME := 60
fuzz: build
	python fuzz/run.py --time $(TIME) $(SEED:%=--seed %)

# The core by coverage, TIME seconds for each target. Needs nightly Rust with rust-src and cargo-fuzz.
# Without AddressSanitizer, which would find nothing in a core without unsafe code.
fuzz-coverage:
	for target in batch config plan; do \
		cargo +nightly fuzz run --sanitizer none $$target -- -max_total_time=$(TIME) || exit 1; \
	done

# The core's own tests in Rust's interpreter, which finds undefined behaviour and data races. Needs
# nightly Rust with miri and rust-src. Tree borrows, because of a dependency of rayon. What asks for
# all memory ends Miri, and what counts to millions takes it hours; the pools, which live as long as
# the process, are no leak.
miri:
	MIRIFLAGS="-Zmiri-tree-borrows -Zmiri-disable-isolation -Zmiri-ignore-leaks" \
		cargo +nightly miri test --lib -- \
		--skip what_cannot_be_had --skip buckets_shuffled --skip many_items

# The tests of the ops with a library whose Rust and C++ look at each access of memory, and whose C++
# looks at its arithmetic as well (but not at classes of torch, which hides what that needs). Needs
# nightly Rust; the runtime is gcc's, which Python is given.
SANITIZED := arrow attention collate collate_samples microbatch ops_collate ops_mask ops_plan \
	ops_refusals plan plan_files plan_inputs plan_orders script threads transport
TARGET := x86_64-unknown-linux-gnu

sanitize: build
	CXXFLAGS_$(subst -,_,$(TARGET))="-fsanitize=undefined -fno-sanitize=vptr -fno-sanitize-recover" \
	RUSTFLAGS="-Zsanitizer=address -Clink-arg=-lubsan" $(CARGO) +nightly build --lib $(FEATURES) \
		--locked --target $(TARGET) --target-dir build/sanitize
	MULTIPACK_LIBRARY=build/sanitize/$(TARGET)/release/libmultipack.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		python -m pytest $(SANITIZED:%=tests/python/test_%.py)

# The core's own tests and those of its pools with every access and lock looked at, those of the
# standard library and of rayon too: some minutes. Needs nightly Rust with rust-src.
sanitize-threads:
	RUSTFLAGS=-Zsanitizer=thread TSAN_OPTIONS=allocator_may_return_null=1 cargo +nightly test \
		-Zbuild-std --target $(TARGET) --target-dir build/sanitize-threads --lib --test batch_pool

lint: lint-core lint-torch lint-tools

lint-core: | tools
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps

lint-torch: $(VENV)/requirements.stamp
	$(CARGO) clippy --all-targets $(FEATURES) -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps $(FEATURES)

lint-tools: $(VENV)/requirements.stamp
	clang-format --dry-run --Werror $(shell git ls-files '*.cpp' '*.h')
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
bench-peers: build $(VENV)/peers.stamp
	PYTHONPATH=$(CURDIR)/$(VENV)/peers python benches/python/peers.py

# The reference, from the docstrings: build/docs, and target/doc for Rust.
docs: build $(VENV)/docs.stamp
	# pdoc does not find what the fields of named tuples refer to.
	python -W error::UserWarning -W "ignore:Error parsing type annotation ForwardRef" \
		-m pdoc --docformat google --output-directory build/docs \
		multipack multipack.ops multipack.integrations $(addprefix multipack.integrations., \
		accelerate axolotl hf lightning torchdata trl)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps $(FEATURES)

# What is about the sources: benches, pages, the wheel that is built of them.
SOURCE_TESTS := $(patsubst %,tests/python/test_%.py,benches docs packaging versions)

test-sources: build
	python -m pytest $(SOURCE_TESTS)

wheel: $(VENV)/requirements.stamp
	python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# All others in an environment that has the wheel, from a folder without the sources.
ifdef TORCH
INSTALLED := $(VENV)/tests

test-wheel: build
	rm -rf $(INSTALLED)
	mkdir $(INSTALLED)
	cp -r pyproject.toml tests examples $(INSTALLED)
	cd $(INSTALLED) && rm $(SOURCE_TESTS)
	cd $(INSTALLED) && python -m pytest $(TESTS)

# And under other Pythons, which PYTHONS names.
test-pythons: build
	tests/pythons.sh dist/*+torch$(TORCH)-*.whl $(PYTHONS)

$(VENV)/multipack.stamp: $(VENV)/requirements.stamp $(SOURCES) $(PACKAGE)
	rm -f dist/*+torch$(TORCH)-*.whl
	$(MAKE) wheel
	python -m pip install --quiet --no-deps --force-reinstall dist/*+torch$(TORCH)-*.whl
	touch $@
else
test-wheel test-pythons:
	$(MAKE) $@ TORCH=2.13

$(VENV)/multipack.stamp: $(VENV)/requirements.stamp $(SOURCES)
	@echo "Compiling the library (the first time takes some minutes)"
	python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
endif

# It sees the packages of .venv behind its own, and this package where it lies.
.venv-min/requirements.stamp: requirements-min.txt .venv/requirements.stamp
	test -x .venv-min/bin/python || python -m venv --without-pip .venv-min
	printf '%s\n' $(CURDIR)/.venv/lib/python*/site-packages $(CURDIR)/torch_ext \
		> $$(echo .venv-min/lib/python*/site-packages)/shared.pth
	.venv-min/bin/python -m pip install --quiet --requirement $<
	touch $@

# The pinned torch, unless TORCH asks for another, and then an older setuptools if that torch wants
# it: 2.12 wants one below 82.
$(VENV)/requirements.stamp: requirements.txt | tools
	@echo "Installing torch and the rest of requirements.txt into $(VENV) (some gigabytes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -e '/^torch==$(TORCH)/!s/^torch==.*/torch==$(TORCH).*/' \
		-e '$(TORCH:%=s/^setuptools==/setuptools>=77,<=/)' \
		requirements.txt > $(VENV)/requirements.txt
	python -m pip install --quiet --requirement $(VENV)/requirements.txt
	touch $@

$(VENV)/docs.stamp: docs/requirements.txt $(VENV)/requirements.stamp
	python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

$(VENV)/peers.stamp: benches/python/requirements.txt $(VENV)/requirements.stamp
	rm -rf $(VENV)/peers
	python -m pip install --quiet --no-deps --ignore-requires-python --target $(VENV)/peers \
		--requirement benches/python/requirements.txt
	touch $@

tools:
	@command -v cargo > /dev/null || \
		{ echo "multipack needs Rust 1.88 or newer: install it from https://rustup.rs" >&2; exit 1; }
	@command -v c++ > /dev/null || \
		{ echo "multipack needs a C++ compiler: install g++ or clang" >&2; exit 1; }
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "multipack needs Python 3.10 or newer, with its venv module" >&2; exit 1; }

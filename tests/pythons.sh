#!/bin/sh
# Tries the wheel under other Pythons than the one that built it:
#
#   make test-pythons PYTHONS="python3.10 python3.12"
#
# Each gets an environment of its own, with its own build of torch and of little else. CUDA's
# libraries, which torch wants even where there is no GPU, know nothing of Python and are borrowed
# from the environment that built the wheel. It leaves nothing behind.
set -eu
wheel=$1
shift
torch=$(python -c 'from importlib.metadata import version; print(version("torch"))')
nvidia=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/copy"
cp -r pyproject.toml tests "$folder/copy"

for python; do
    "$python" -m venv "$folder/env"
    pip() { "$folder/env/bin/python" -m pip --quiet install "$@"; }
    pip filelock fsspec jinja2 networkx numpy pytest pyyaml sympy typing-extensions
    pip --no-deps "torch==$torch"
    ln -s "$nvidia" "$folder"/env/lib/python*/site-packages/
    pip --no-deps "$wheel"
    "$folder/env/bin/python" --version
    (cd "$folder/copy/tests/python" &&
        "$folder/env/bin/python" -m pytest --quiet \
            test_load.py test_ops_*.py test_plan*.py test_sampler.py)
    rm -rf "$folder/env"
done

#!/usr/bin/env bash
# make_environment.sh FOLDER: a virtual environment with the project (editable) and its development tools.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$1

find_python() {
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "Python 3.11 or newer was not found: install it (Debian 12, Ubuntu 24.04: apt install python3 python3-venv)" >&2
    return 1
}

can_build_c() {
    command -v "${CC:-cc}" >/dev/null || return 1
    "$1" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'
}

python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$python cannot make virtual environments: apt install python$version-venv (or python3-venv), then again" >&2
    exit 1
fi

echo "making $environment with $("$python" --version) (once; a few minutes, most of them torch)"
"$python" -m venv --clear "$environment"
pip() { "$environment/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! can_build_c "$python"; then
    echo "no C compiler or no Python headers: pycosat is left out, so reasoning_gym's zebra_puzzles will not work"
    pip install -qq setup/pycosat_absent
fi
pip install -qq --progress-bar off --constraint constraints.txt --editable '.[dev,docs]'

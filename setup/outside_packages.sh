#!/usr/bin/env bash
# outside_packages.sh PYTHON: runs the tests against packages that the project works with and does not depend on:
# verifiers' environments, lm-eval as a client of the server, clients of agents, Hugging Face's datasets, the clients of
# trackers. They are installed in build/outside, in front of PYTHON's packages, in the versions of outside.txt (once; a minute or two).
# Prints one line. Where they can't be installed it says so and exits 0; a test that fails is shown, and the exit is 1.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1 folder=build/outside
packages=(verifiers lm-eval datasets wandb mlflow trackio swanlab anthropic openai-agents)
tests=(
    tests/unit/environments/test_verifiers_adapter.py
    tests/unit/rollout/test_renderers.py
    tests/unit/agents/test_clients.py
    tests/e2e/test_lm_eval.py
    tests/unit/data/test_hub_datasets.py::test_the_real_package_reads_the_same_folders
    tests/unit/telemetry/test_real_trackers.py
    tests/unit/data/test_rows.py::test_saved_and_loadable_folders
)

without() {
    echo "verifiers, lm-eval, datasets, trackers: $1; the tests against them did not run"
    exit 0
}

wanted="$("$python" -V) $(cat setup/outside.txt)" || without "there is no $python"
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
    said=$("$python" -m venv --clear "$folder" 2>&1) || without "no environment ($(echo "$said" | tail -n 1))"
    theirs=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$theirs/zz_project.pth"
    said=$(timeout 600 "$folder/bin/python" -m pip --disable-pip-version-check install -qq --no-compile --progress-bar off \
        --constraint setup/outside.txt "${packages[@]}" 2>&1) || without "pip failed ($(echo "${said:-not done in 600 s}" | tail -n 1))"
    said=$("$folder/bin/python" -c 'import datasets, lm_eval, mlflow, pytest, swanlab, torch, trackio, verifiers, wandb' 2>&1) ||
        without "they can't be imported ($(echo "$said" | tail -n 1))"
    echo "$wanted" >"$folder/installed"
fi

export OCTETRL_REQUIRE=verifiers,trackers,agents HF_HUB_OFFLINE=1 HF_HOME="$PWD/build/outside/cache"
if ! "$folder/bin/python" -c 'import openai, uvicorn' 2>/dev/null; then
    echo "lm-eval: the server or the official client is not installed; its tests did not run"
else
    OCTETRL_REQUIRE+=,lm-eval,serve
fi
said=$(timeout 1500 "$folder/bin/python" -m pytest -p no:cacheprovider -p no:xdist "${tests[@]}" 2>&1) || {
    echo "$said"
    exit 1
}
versions=$(grep -E '^(verifiers|lm_eval|datasets|wandb|mlflow|trackio|swanlab|anthropic|openai-agents)==' setup/outside.txt | paste -sd ' ')
echo "$versions: $(echo "$said" | grep -oE '[0-9]+ passed' | tail -n 1)"

#!/usr/bin/env bash
# outside_packages.sh PYTHON [NAME...]: runs the tests against packages that the project works with and does not depend
# on, each group in an environment of its own, build/outside/NAME, in the versions of setup/outside/NAME.txt (installed
# once; some minutes and about 4 GB for all). Prints one line for each: what passed, or why it could not run. A test
# that fails is shown, and the exit is 1. The group docker runs the tests of boxes beside a Docker daemon.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
names=("${@:-clients verifiers vllm templates openenv mini-swe-agent stores harbor docker}")
export HF_HUB_OFFLINE=1 HF_HOME="$PWD/build/outside/cache"
status=0

# group NAME IN-FRONT NEEDS PACKAGES TESTS: the tests run with PYTHON's packages and, where IN-FRONT is yes, the group's
# packages in front of them; else a program of the group runs beside the tests, which find it at OCTETRL_OUTSIDE.
group() {
    case " ${names[*]} " in *" $1 "*) ;; *) return ;; esac
    local folder="build/outside/$1" pins="setup/outside/$1.txt" wanted said
    local packages=($4) tests=($5)
    without() { echo "$1: $2; its tests did not run"; }
    if [ -z "$base" ]; then
        without "$1" "there is no Python 3.12"
        return
    fi
    wanted="$("$base" -V) $(cat "$pins")"
    if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
        said=$("$base" -m venv --clear "$folder" 2>&1) || { without "$1" "no environment ($(tail -n 1 <<<"$said"))"; return; }
        if [ "$2" = yes ]; then
            local theirs
            theirs=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
            "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$theirs/zz_project.pth"
        fi
        said=$(timeout 600 "$folder/bin/python" -m pip --disable-pip-version-check install -qq --no-compile --progress-bar off \
            --constraint "$pins" "${packages[@]}" 2>&1) ||
            { without "$1" "pip failed ($(tail -n 1 <<<"${said:-not done in 600 s}"))"; return; }
        echo "$wanted" >"$folder/installed"
    fi
    local runs="$python"
    [ "$2" = yes ] && runs="$folder/bin/python"
    said=$(OCTETRL_REQUIRE="$3" OCTETRL_OUTSIDE="$PWD/$folder/bin" timeout 1500 "$runs" -m pytest -p no:cacheprovider \
        -p no:xdist "${tests[@]}" 2>&1) || { echo "$said"; status=1; return; }
    versions=$("$folder/bin/python" -c 'import sys; from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in (each.split("[")[0] for each in sys.argv[1:] if each[0] != "-")), sep=", ")' "${packages[@]}")
    echo "$versions: $(grep -oE '[0-9]+ passed' <<<"$said" | tail -n 1)"
}

"$python" -V >/dev/null || exit 1
base=$python
group clients yes trackers,agents,lm-eval,serve \
    "lm-eval[api] datasets wandb mlflow trackio swanlab anthropic openai-agents" \
    "tests/unit/agents/test_clients.py tests/e2e/test_lm_eval.py tests/unit/telemetry/test_real_trackers.py
     tests/unit/data/test_hub_datasets.py::test_the_real_package_reads_the_same_folders
     tests/unit/data/test_rows.py::test_saved_and_loadable_folders
     tests/unit/data/test_tasks_file.py::test_rows_of_verl_and_trl_need_no_mapping"
group verifiers yes verifiers "verifiers renderers textarena nltk uv" \
    "tests/unit/environments/test_verifiers_v1.py tests/unit/rollout/test_renderers.py"
group vllm yes vllm-parsers "--no-deps $(sed -e '/^#/d' -e 's/==.*//' setup/outside/vllm.txt | paste -sd ' ')" tests/unit/rollout/test_vllm_parsers.py
group templates yes templates "--no-deps trl litellm" tests/unit/rollout/test_real_templates.py
group openenv yes openenv openenv tests/unit/environments/test_openenv.py
group mini-swe-agent no mini-swe-agent mini-swe-agent tests/unit/agents/test_mini_swe_agent.py
group stores yes s3 "s3fs moto[server]" tests/unit/run/test_store.py
base=
for candidate in python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then base=$candidate; fi
done
group harbor no harbor harbor tests/unit/environments/test_harbor.py::test_harbor_gives_the_same_reward
case " ${names[*]} " in
*" docker "*)
    said=$(OCTETRL_REQUIRE=docker timeout 1500 bash setup/docker.sh "$python" -m pytest -p no:cacheprovider -p no:xdist \
        -k docker tests/unit/boxes tests/e2e/test_boxes.py 2>&1)
    case $? in
    0) echo "$(docker --version): $(grep -oE '[0-9]+ passed' <<<"$said" | tail -n 1)" ;;
    3) echo "docker: $(tail -n 1 <<<"$said"); its tests did not run" ;;
    *) echo "$said"; status=1 ;;
    esac
    ;;
esac
exit "$status"

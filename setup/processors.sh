#!/usr/bin/env bash
# processors.sh PYTHON [pytest's arguments]: runs the numeric tests once for each line of `settings`, one after another.
# Each makes torch, oneDNN and MKL use what older processors have, so products take other kernels and sums other orders.
# Settings that failed are named at the end, and the exit is 1. SETTING=n runs the n-th alone, from 1.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
settings=(
    "" # this processor, as it is
    "ATEN_CPU_CAPABILITY=avx2"
    "ONEDNN_MAX_CPU_ISA=AVX2"
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
)
tests=(
    tests/parity
    tests/unit/{algorithms,doctor,engine,fp8,kernels,layers,models,trainer}
    tests/unit/workers/test_{many_kinds,reward_scorer}.py
    tests/unit/workers/test_{tail,whole_runs,workers}.py
)

failed=()
for number in ${SETTING:-$(seq ${#settings[@]})}; do
    setting=${settings[number - 1]}
    echo "== ${setting:-this processor, as it is}"
    # shellcheck disable=SC2086  # several words
    env $setting "$python" -m pytest -m "not gpu" -p no:cacheprovider "$@" "${tests[@]}" || failed+=("$number: $setting")
done
[ ${#failed[@]} = 0 ] && exit
printf 'failed with SETTING=%s\n' "${failed[@]}"
exit 1

#!/usr/bin/env bash
# Runs the suite on real vLLM on CPU: builds the engine environment if it is not cached, then measures. With arguments
# it is one run of pytest with them added; without, every connector that runs on CPU and the contract of all engines.
# No baseline is required: how fast a CPU is says nothing about a GPU, and differs from machine to machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
connectors=pd-1p1d,pd-1p1d-mooncake-tcp
contract=vllm-
if ! engines=$(python scripts/cpu_vllm/build.py --mooncake | tail -n 1); then
    echo "NOT RUN: PD over Mooncake. Its libraries are not here and could not be fetched, see above." >&2
    connectors=pd-1p1d
    contract="vllm- and not mooncake"
    engines=$(python scripts/cpu_vllm/build.py | tail -n 1)
fi

measure() {
    pytest -m "pd or aggregated" tests/perf --engine vllm --gpus cpu --engine-env "$engines" --require-baseline no "$@"
}

status=0
measure --topology "$connectors,aggregated-2x" --workload cpu-smoke "$@" || status=$?
if [ $# -eq 0 ]; then
    measure --topology pd-1p1d-example --workload cpu-blocks || status=$?
    # As root: the same engines over a slowed network. Elsewhere it is skipped and says why.
    pytest -m fault tests/perf -k slow_link -rs --engine vllm --gpus cpu --engine-env "$engines" --topology pd-1p1d || status=$?
    PDPERF_CPU_ENGINES="$engines" pytest tests/integration/test_contract_engines.py -k "$contract" || status=$?
fi
exit "$status"

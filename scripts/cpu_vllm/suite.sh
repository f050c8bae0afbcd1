#!/usr/bin/env bash
# Runs the suite on real vLLM on CPU: builds the engine environment if it is not cached, then measures.
# No baseline is required: how fast a CPU is says nothing about a GPU, and differs from machine to machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
engines=$(python scripts/cpu_vllm/build.py | tail -n 1)
exec pytest -m "pd or aggregated" tests/perf --engine vllm --gpus cpu --engine-env "$engines" \
    --topology pd-1p1d,aggregated-2x --workload cpu-smoke --require-baseline no "$@"

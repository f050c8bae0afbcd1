#!/usr/bin/env bash
# Runs the suite on a GPU machine without a package registry: engines on PATH, this source tree, that machine's
# own Python. Ends by itself before a hard limit and packs what was measured, also when it was cut off.
#
#   scripts/gpu/suite.sh MODEL OUT SECONDS [pytest arguments...]
#
# MODEL    folder with config.json; weights are made up (--load-format dummy): speed is real, text is not
# OUT      folder for run.log and results.tar.gz
# SECONDS  after which pytest is interrupted: it then takes everything down and keeps the finished cells
set -uo pipefail
cd "$(dirname "$0")/../.."
model=$1 out=$2 seconds=$3
shift 3
mkdir -p "$out"

pack() { tar -czf "$out/results.tar.gz" --exclude=stamps.bin --exclude=job.json pdperf-results baselines history 2>/dev/null; }
trap pack EXIT

timeout --signal=INT --kill-after=40 "$seconds" python3 -m pytest tests/perf -v \
    --engine vllm --gpus 0-1 --model "$model" --served-model "$(basename "$model")" \
    --topology pd-1p1d,aggregated-2x --workload fixed-shapes-short --require-baseline no \
    --engine-arg load_format=dummy --engine-arg max_model_len=16384 --engine-arg max_num_seqs=64 \
    --engine-arg gpu_memory_utilization=0.85 "$@" 2>&1 | tee "$out/run.log"

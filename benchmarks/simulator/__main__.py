"""Print the simulator beside the published H100 table: `python -m benchmarks.simulator`."""

from __future__ import annotations

import argparse
import statistics as stats
import sys
import time
from collections import defaultdict
from pathlib import Path

from .fit import METRICS, PUBLISHED, SEEDS, errors, model, read_cells

TITLES = {
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "tpot_p50": "TPOT p50",
    "itl_p99": "ITL p99",
    "output_throughput": "tok/s",
}
WIDTH = 25


def main() -> int:
    """Model / published (error) of every cell, then the errors' medians, means and maxima."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="table to compare with (JSON)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="simulated runs a cell (default 5)")
    options = parser.parse_args()
    print("SIMULATED / published (error); milliseconds, tokens per second; mean over seeds")
    print(f"{'cell':<27}" + "".join(f"{TITLES[name]:>{WIDTH}}" for name in METRICS))
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    began = time.process_time()
    runs = 0
    for cell in read_cells(options.published):
        modelled = model(cell, range(options.seeds))
        runs += options.seeds
        wrong = errors(cell, modelled)
        columns = []
        for name in METRICS:
            if name not in cell.published:
                columns.append("not published")
                continue
            error = f"({wrong[name]:+.0%})" if name in wrong else "(left out)"
            columns.append(f"{modelled[name]:.4g} / {cell.published[name]:.4g} {error}")
            if name in wrong:
                table[cell.topology, name].append(abs(wrong[name]))
        name = f"{cell.topology} {cell.input_tokens}/{cell.output_tokens} c{cell.concurrency}"
        print(f"{name:<27}" + "".join(f"{column:>{WIDTH}}" for column in columns))
    print(f"\n{'|error|':<12} {'metric':<10} {'cells':>5} {'median':>8} {'mean':>8} {'max':>8}")
    for (topology, name), values in sorted(table.items()):
        numbers = f"{stats.median(values):>8.1%} {stats.fmean(values):>8.1%} {max(values):>8.1%}"
        print(f"{topology:<12} {TITLES[name]:<10} {len(values):>5} {numbers}")
    print(f"\n{runs} simulated runs in {time.process_time() - began:.1f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())

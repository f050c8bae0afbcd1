"""Runs in the engine's Python, which has torch and not this package: times fixed work on every visible GPU.

Prints one line of JSON, {"ms": {...}, "spread": {...}}; of several GPUs or pairs the slowest counts. Each number is the
median of the batches after a warm-up: the fastest would hide a GPU whose clocks fall under load.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

GEMM_SIZE = 8192
COPY_BYTES = 512 * 2**20
PEER_BYTES = 256 * 2**20
WARM_UP_MS = 300.0
BATCHES = 15


def timed(torch: Any, device: int, work: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of one call (median batch) and the distance of the quartiles relative to it."""
    with torch.cuda.device(device):

        def batch() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / calls

        warm = 0.0
        while warm < WARM_UP_MS:
            warm += batch() * calls
        times = [batch() for _ in range(BATCHES)]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / middle


def main() -> None:
    """Time the work and print it."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("torch sees no GPU")
    found: dict[str, list[tuple[float, float]]] = {"gemm": [], "hbm_copy": [], "peer_copy": []}
    for device in range(count):
        a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
        c = torch.empty_like(a)
        found["gemm"].append(timed(torch, device, partial(torch.mm, a, b, out=c), 4))
        del a, b, c
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        found["hbm_copy"].append(timed(torch, device, partial(target.copy_, source), 8))
        del source, target
        if count > 1:
            peer = (device + 1) % count
            far = torch.zeros(PEER_BYTES, dtype=torch.uint8, device=device)
            near = torch.empty(PEER_BYTES, dtype=torch.uint8, device=peer)
            found["peer_copy"].append(timed(torch, device, partial(near.copy_, far), 4))
            del far, near
    slowest = {name: max(rows) for name, rows in found.items() if rows}
    print(
        json.dumps(
            {
                "ms": {name: ms for name, (ms, _) in slowest.items()},
                "spread": {name: spread for name, (_, spread) in slowest.items()},
            }
        )
    )


if __name__ == "__main__":
    main()

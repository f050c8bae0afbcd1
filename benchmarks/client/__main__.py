"""Compare load clients against a server that knows when it sent what: `python -m benchmarks.client`.

Server and client get a core each. Clients take turns within a round, so a busy minute of the machine hits all of them;
medians over the rounds are shown. Times are milliseconds unless stated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.client.clients import CLIENTS
from benchmarks.client.load import Load, Report
from benchmarks.client.score import Score, score
from benchmarks.client.tools import TOOLS, run_tool

ROOT = Path(__file__).resolve().parents[2]

LOADS: dict[str, Load] = {
    "16 x 50/s": Load(16, 32, 100, 50, 20),
    "64 x 50/s": Load(64, 128, 100, 50, 20),
    "64 x 50/s spread": Load(64, 128, 100, 50, 20, phases=64),
    "256 x 10/s": Load(256, 512, 30, 50, 100),
    "64 x 50/s, hog": Load(64, 128, 100, 50, 20, hog_ms=10),
    "1000 x 5/s": Load(1000, 1000, 25, 300, 200, phases=1000),
    "1000 x 10/s": Load(1000, 1000, 50, 300, 100, phases=1000),
    "1000 x 20/s": Load(1000, 1000, 100, 300, 50, phases=1000),
    "1000 x 25/s": Load(1000, 1000, 120, 300, 40, phases=1000),
    "1000 x 30/s": Load(1000, 1000, 150, 300, 33.3, phases=1000),
    "1000 x 20/s at once": Load(1000, 1000, 100, 300, 50),
}
DEFAULT = ["16 x 50/s", "64 x 50/s", "256 x 10/s", "64 x 50/s, hog"]


@dataclass(frozen=True, slots=True)
class Cores:
    """One core for the server, one for the client; equal on a machine with one."""

    server: int
    client: int


def cores() -> Cores:
    """The first two cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[-1])


@contextlib.contextmanager
def null_server(folder: Path, core: int) -> Iterator[str]:
    """A null server for the length of a block; its truth lies in `truth.json` afterwards."""
    port_file, truth = folder / "port", folder / "truth.json"
    for stale in (port_file, truth):
        stale.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client.null_server", str(port_file), str(truth)], cwd=ROOT
    )
    os.sched_setaffinity(process.pid, {core})
    try:
        end = time.monotonic() + 20
        while not port_file.exists():
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit("the null server did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure(
    client: str, load: Load, folder: Path, where: Cores, tools: Mapping[str, Path], tokenizer: str
) -> Score:
    """One run of one client against a fresh server."""
    out = folder / "report.json"
    with null_server(folder, where.server) as url:
        if client in tools:
            with tempfile.TemporaryDirectory() as work:
                report = run_tool(client, tools[client], url, load, tokenizer, Path(work), where.client)
        else:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.client.clients",
                    client,
                    url,
                    json.dumps(asdict(load)),
                    str(out),
                ],
                cwd=ROOT,
            )
            os.sched_setaffinity(process.pid, {where.client})
            if process.wait(300):
                raise SystemExit(f"client {client} failed")
            report = Report.read(out)
    return score(load, report, json.loads((folder / "truth.json").read_text()))


COLUMNS = (
    ("event err p50", "event_p50", "{:.3f}"),
    ("p99", "event_p99", "{:.2f}"),
    ("max", "event_max", "{:.1f}"),
    ("|TTFT err| p50", "ttft_p50", "{:.2f}"),
    ("p99", "ttft_p99", "{:.2f}"),
    ("ITL p99 err", "itl_p99_error", "{:+.1%}"),
    ("lag p50", "lag_p50", "{:.3f}"),
    ("p99", "lag_p99", "{:.2f}"),
    ("max", "lag_max", "{:.1f}"),
    ("us/event", "cpu_us_per_event", "{:.1f}"),
    ("B/event", "bytes_per_event", "{:.0f}"),
    ("merged", "merged_share", "{:.2%}"),
)


def shown(scores: list[Score]) -> list[str]:
    """Medians over rounds, one cell a column; a dash where a client does not know."""
    cells = []
    for _, name, form in COLUMNS:
        values = [v for s in scores if (v := getattr(s, name)) is not None]
        cells.append(form.format(statistics.median(values)) if values else "-")
    return cells


def main() -> None:
    """Run the chosen loads and print a table each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default=",".join(CLIENTS), help=f"of {', '.join(CLIENTS)}")
    parser.add_argument(
        "--loads", default="", help="names, separated by ';'; `all`; default: " + "; ".join(DEFAULT)
    )
    parser.add_argument("--json", type=Path, help="also write every score here")
    parser.add_argument(
        "--tool",
        action="append",
        default=[],
        metavar="NAME=ENVIRONMENT",
        help=f"also run this program from its environment's bin/; NAME of {', '.join(TOOLS)}",
    )
    parser.add_argument("--tokenizer", default="", help="folder of a tokenizer, which the programs need")
    options = parser.parse_args()
    tools = {name: Path(env).resolve() for name, _, env in (item.partition("=") for item in options.tool)}
    if tools and not options.tokenizer:
        parser.error("--tool needs --tokenizer FOLDER")
    names = list(LOADS) if options.loads == "all" else [n for n in options.loads.split(";") if n] or DEFAULT
    clients = options.clients.split(",")
    kinds = (("load", names, [*LOADS]), ("client", clients, [*CLIENTS]), ("tool", [*tools], [*TOOLS]))
    for kind, asked, known in kinds:
        unknown = [name for name in asked if name not in known]
        if unknown:
            parser.error(f"no {kind} {unknown[0]!r}; known: {'; '.join(known)}")
    clients += tools
    where = cores()
    print(f"server on core {where.server}, client on core {where.client}, {options.rounds} rounds, medians\n")
    everything: dict[str, dict[str, list[Score]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            load = LOADS[name]
            found: dict[str, list[Score]] = {client: [] for client in clients}
            for _ in range(options.rounds):
                for client in clients:
                    found[client].append(measure(client, load, Path(folder), where, tools, options.tokenizer))
            everything[name] = found
            true = found[clients[0]][0].ttft_true_p50
            print(f"{name}: {load.events_per_s:,.0f} events/s, true TTFT p50 {true:.2f} ms")
            table([["client", *(c[0] for c in COLUMNS)], *([c, *shown(s)] for c, s in found.items())])
    if options.json:
        rows = {
            load: {c: [asdict(s) for s in scores] for c, scores in by.items()}
            for load, by in everything.items()
        }
        options.json.write_text(json.dumps(rows, indent=1))


def table(rows: list[list[str]]) -> None:
    """Right-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":
    main()

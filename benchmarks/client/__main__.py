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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.client.clients import CLIENTS
from benchmarks.client.environments import Built, build_all, reason, tokenizer
from benchmarks.client.load import Load, Report
from benchmarks.client.machine import watch_core
from benchmarks.client.plan import LADDER, SECTIONS, SUSTAINED_MS, rung
from benchmarks.client.score import Score, score
from benchmarks.client.tables import COLUMNS, Table, header, print_table, write_markdown
from benchmarks.client.tools import TITLES, TOOLS, ToolFailed, run_tool
from scripts.cpu_vllm.build import BuildError

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("loops", *TOOLS)
CLIENT_S = 300.0
LOOK_S = 8.0
"""How long the client's core is looked at before any client runs on it."""
BAR_RATE = 20_000.0
"""Events/s that one core is promised to read."""


@dataclass(frozen=True, slots=True)
class Cores:
    """One core for the server, one for the client; equal on a machine with one."""

    server: int
    client: int


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part, and from where."""

    clients: tuple[str, ...]
    """In-process clients by name, then programs."""
    environments: Mapping[str, Path] = field(default_factory=dict)
    tokenizer: str = ""

    def python(self, client: str) -> str:
        """Interpreter of an in-process client: the plain loops' own where it was built, else this one."""
        folder = self.environments.get("loops") if client != "pdperf" else None
        return str(folder / "bin" / "python") if folder else sys.executable


def cores() -> Cores:
    """The first two cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[-1])


@contextlib.contextmanager
def null_server(folder: Path, core: int, pace: Mapping[str, object]) -> Iterator[str]:
    """A null server for the length of a block; its truth lies in `truth.json` afterwards."""
    port_file, truth = folder / "port", folder / "truth.json"
    for stale in (port_file, truth):
        stale.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client.null_server", str(port_file), str(truth), json.dumps(pace)],
        cwd=ROOT,
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


def measure(client: str, load: Load, folder: Path, where: Cores, taking_part: Field) -> Score:
    """One run of one client against a fresh server. Raises ToolFailed."""
    out = folder / "report.json"
    with null_server(folder, where.server, load.pace) as url:
        if client in TOOLS:
            with tempfile.TemporaryDirectory() as work:
                env = taking_part.environments[client]
                report = run_tool(client, env, url, load, taking_part.tokenizer, Path(work), where.client)
        else:
            arguments = [client, url, json.dumps(asdict(load)), str(out)]
            process = subprocess.Popen(
                [taking_part.python(client), "-m", "benchmarks.client.clients", *arguments], cwd=ROOT
            )
            os.sched_setaffinity(process.pid, {where.client})
            try:
                status = process.wait(CLIENT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise ToolFailed(f"did not end within {CLIENT_S:.0f} s") from None
            if status:
                raise ToolFailed(f"exit status {status}")
            report = Report.read(out)
    return score(load, report, json.loads((folder / "truth.json").read_text()))


def compare(
    name: str, load: Load, taking_part: Field, clients: list[str], rounds: int, programs: int, folder: Path
) -> tuple[Table, dict[str, list[Score]]]:
    """One table: every client in turn, `rounds` times, whole programs `programs` times."""
    found: dict[str, list[Score]] = {client: [] for client in clients}
    failed: dict[str, str] = {}
    for number in range(max(rounds, programs)):
        for client in clients:
            if number < (programs if client in TOOLS else rounds) and client not in failed:
                try:
                    found[client].append(measure(client, load, folder, cores(), taking_part))
                except (ToolFailed, ValueError) as problem:
                    failed[client] = reason(str(problem))
    true = [s.ttft_true_p50 for scores in found.values() for s in scores]
    title = f"{name}: {load.events_per_s:,.0f} events/s"
    title += f", true TTFT p50 {statistics.median(true):.2f} ms" if true else ""
    rows = {TITLES.get(c, c): shown(s) if s else failed[c] for c, s in found.items()}
    return Table(title, tuple(c[0] for c in COLUMNS), rows), found


def shown(scores: list[Score]) -> list[str]:
    """Medians over rounds, one cell a column; a dash where a client does not know."""
    cells = []
    for _, name, form in COLUMNS:
        values = [v for s in scores if (v := getattr(s, name)) is not None]
        cells.append(form.format(statistics.median(values)) if values else "-")
    return cells


def climb(client: str, taking_part: Field, folder: Path) -> tuple[int, str]:
    """Highest rung that a client sustains in one of two tries, and what ended the climb."""
    best = 0
    for rate in LADDER:
        why = ""
        for _ in range(2):
            try:
                found = measure(client, rung(rate), folder, cores(), taking_part)
            except (ToolFailed, ValueError) as problem:
                why = reason(str(problem))
                continue
            late = found.lag_p99 if found.lag_p99 is not None else found.event_p99
            assert late is not None, "a client that reports no moments"
            if late < SUSTAINED_MS:
                break
            why = f"{rate:,}/s: lag p99 {late:.1f} ms"
        else:
            return best, why
        best = rate
    return best, "no higher rate tried"


def choose(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Field, Built]:
    """Clients and environments from the command line; builds what is missing."""
    wanted = [n for n in options.peers.split(",") if n]
    wanted = list(PEERS) if wanted == ["all"] else wanted
    unknown = [n for n in wanted if n not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}; known: {', '.join(PEERS)}, all")
    built = build_all(wanted, options.torch_index)
    environments, missing = dict(built.environments), dict(built.missing)
    programs = [n for n in TOOLS if n in environments]
    folder = ""
    if programs:
        try:
            folder = str(tokenizer(environments[n] for n in programs))
        except BuildError as problem:
            missing |= dict.fromkeys(programs, f"no tokenizer: {reason(str(problem))}")
            programs = []
    clients = [c for c in options.clients.split(",") if c]
    return Field((*clients, *programs), environments, folder), Built(environments, missing)


def main() -> None:
    """Run the chosen loads and print a table each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of pdperf and the plain loops (default 2)")
    parser.add_argument("--program-rounds", type=int, default=1, help="of whole programs (default 1)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of streaming in a run (default 4)")
    parser.add_argument("--clients", default=",".join(CLIENTS), help=f"of {', '.join(CLIENTS)}")
    parser.add_argument(
        "--loads", default="", help="names separated by ';' (default: all): " + "; ".join(SECTIONS)
    )
    parser.add_argument(
        "--peers",
        default="",
        help=f"run these from environments of their own, built when missing: {', '.join(PEERS)}, or all",
    )
    parser.add_argument("--torch-index", metavar="URL", help="package index that serves CPU builds of torch")
    parser.add_argument("--no-ladder", action="store_true", help="do not look for the highest sustained rate")
    parser.add_argument("--build-only", action="store_true", help="build the environments and stop")
    parser.add_argument("--json", type=Path, help="also write every score here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    options = parser.parse_args()
    names = [n for n in options.loads.split(";") if n] or list(SECTIONS)
    for kind, asked, known in (
        ("load", names, [*SECTIONS]),
        ("client", [c for c in options.clients.split(",") if c], [*CLIENTS]),
    ):
        unknown = [name for name in asked if name not in known]
        if unknown:
            parser.error(f"no {kind} {unknown[0]!r}; known: {'; '.join(known)}")
    taking_part, built = choose(options, parser)
    for name, why in built.missing.items():
        print(f"{TITLES.get(name, name)} cannot be compared: {why}")
    if options.build_only:
        raise SystemExit(1 if built.missing else 0)
    began = time.monotonic()
    lines = header(taking_part.environments, options.rounds, options.program_rounds, options.seconds)
    lines.append(watch_core(cores().client, LOOK_S).line(BAR_RATE, SUSTAINED_MS))
    print("\n".join(lines) + "\n", flush=True)
    tables: list[Table] = []
    everything: dict[str, dict[str, list[Score]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            section = SECTIONS[name]
            clients = [
                c
                for c in taking_part.clients
                if c == "pdperf" or section.who == "all" or (section.who == "loops" and c not in TOOLS)
            ]
            load = section.load.lasting(options.seconds)
            table, everything[name] = compare(
                name, load, taking_part, clients, options.rounds, options.program_rounds, Path(folder)
            )
            if section.who == "all":
                table.rows.update({TITLES.get(n, n): why for n, why in built.missing.items()})
            tables.append(table)
            print_table(table)
        if not options.no_ladder:
            rows: dict[str, list[str] | str] = {}
            for client in taking_part.clients:
                if client not in TOOLS:
                    best, why = climb(client, taking_part, Path(folder))
                    rows[client] = [f"{best:,}", why]
            title = f"highest rate with 99 % of the events read within {SUSTAINED_MS:g} ms, streams of 20/s"
            tables.append(Table(title, ("events/s", "then"), rows))
            print_table(tables[-1])
    print(f"{time.monotonic() - began:.0f} s")
    if options.json:
        plain = {
            load: {c: [asdict(s) for s in scores] for c, scores in by.items()}
            for load, by in everything.items()
        }
        options.json.write_text(json.dumps(plain, indent=1))
    if options.markdown:
        write_markdown(options.markdown, lines, tables)


if __name__ == "__main__":
    main()

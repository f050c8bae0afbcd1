"""How the comparison is shown: on the terminal, and as Markdown for the documentation."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.client.environments import version_of

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
    ("waited", "waited_ms", "{:.0f}"),
    ("server late p99", "server_late_p99", "{:.2f}"),
)
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "loops": ("httpx", "aiohttp"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "aiperf": ("aiperf",),
    "guidellm": ("guidellm",),
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by client: one text a column, or the one reason why there are none."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[str] | str]


def header(environments: Mapping[str, Path], rounds: int, program_rounds: int, seconds: float) -> list[str]:
    """What was measured where, and how: machine, versions, rounds."""
    versions = [
        f"{name} {version}"
        for env, names in DISTRIBUTIONS.items()
        if env in environments
        for name in names
        if (version := version_of(environments[env] / "bin" / "python", name))
    ]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu_name()}, {os.cpu_count()} cores (load average {load} at the start), Linux "
        f"{platform.release()}, Python {platform.python_version()}{', ' if versions else ''}{', '.join(versions)}",
        f"medians over {rounds} rounds, programs {program_rounds}; about {seconds:g} s of streaming a run; "
        "one core for the server, one for the client",
    ]


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the processor, the machine type where it has no name."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def print_table(table: Table) -> None:
    """Right-aligned columns."""
    print(table.title)
    rows = [["client", *table.columns]]
    rows += [[name, *cells] for name, cells in table.rows.items() if not isinstance(cells, str)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for name, why in table.rows.items():
        if isinstance(why, str):
            print(f"  {name.rjust(widths[0])}  not run: {why}")
    print(flush=True)


def write_markdown(path: Path, lines: Sequence[str], tables: Sequence[Table]) -> None:
    """The tables, without the columns in which no client has anything to say."""
    out = [*(f"{line}." for line in lines), ""]
    for table in tables:
        full = [cells for cells in table.rows.values() if not isinstance(cells, str)]
        kept = [i for i in range(len(table.columns)) if any(cells[i] != "-" for cells in full)]
        out += [f"**{table.title}**", ""]
        out.append(f"| client | {' | '.join(table.columns[i].replace('|', chr(92) + '|') for i in kept)} |")
        out.append("| --- " * (len(kept) + 1) + "|")
        for name, cells in table.rows.items():
            if isinstance(cells, str):
                out.append(f"| {name} | not run: {cells.replace('|', ' ')} |" + " |" * (len(kept) - 1))
            else:
                out.append(f"| {name} | {' | '.join(cells[i] for i in kept)} |")
        out.append("")
    path.write_text("\n".join(out))

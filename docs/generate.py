"""Writes the reference pages that are tables of the code, so that they cannot say anything else than the code does.

python docs/generate.py            write docs/reference/
python docs/generate.py --check    exit status 1 when a page is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pytest_pdperf.cli import build_parser
from pytest_pdperf.gate.verdict import VERDICTS
from pytest_pdperf.measure.table import DEFINITIONS, METRICS
from pytest_pdperf.options import OPTIONS
from pytest_pdperf.report.heat import SYMBOLS
from pytest_pdperf.report.summary_json import EXIT_MEANINGS
from pytest_pdperf.spec.tolerances import Override, Tolerances
from pytest_pdperf.spec.topology import KvTransfer, RoleSpec, RouterSpec, Topology
from pytest_pdperf.spec.workload import Slo
from pytest_pdperf.spec.workload_file import ArrivalForm, GroupForm, StreamForm, WorkloadForm

KEYS: Mapping[str, str] = {
    "Topology.kind": "prefill and decode apart, or both in one engine",
    "Topology.roles": "`prefill` and `decode` for pd, `server` for aggregated; each a role",
    "Topology.engine": "only where the topology serves one engine and no other",
    "Topology.kv_transfer": "how KV moves; pd only",
    "Topology.router": "the router in front",
    "Topology.engine_args": "flags of every engine, without dashes: `max_model_len: 16384`",
    "Topology.env": "environment of every engine",
    "RoleSpec.replicas": "engine processes of this role",
    "RoleSpec.tensor_parallel": "GPUs of each",
    "RoleSpec.args": "flags of this role; they win over `engine_args`",
    "RoleSpec.env": "environment of this role",
    "KvTransfer.connector": "the engine's KV connector",
    "KvTransfer.transport": "asked of the connector and read back from the run",
    "RouterSpec.name": "the engine's usual router when left out",
    "RouterSpec.policy": "how requests are spread, in the router's own words",
    "RouterSpec.port": "a fixed port; else one is reserved",
    "RouterSpec.args": "flags of the router",
    "RouterSpec.env": "environment of the router",
    "GroupForm.id": "id of the cell, where streams make one",
    "GroupForm.shapes": "input/output tokens: `512/256`, or `4096-8192/64` for prompts of mixed length",
    "GroupForm.concurrency": "clients of a closed loop; every shape meets every one",
    "GroupForm.arrivals": "open loops and traces, beside or instead of concurrency",
    "GroupForm.requests": "a number, or one for each concurrency with `default`; else 32, or 4 a client if more",
    "GroupForm.think_s": "seconds that each client waits between its requests",
    "GroupForm.streams": "several traffic classes in one cell instead of shapes; the first stands for the cell",
    "GroupForm.warmups": "requests before the measured ones (4)",
    "GroupForm.slo": "bounds that a good request keeps",
    "GroupForm.timeout_s": "deadline of one request (600)",
    "WorkloadForm.description": "for the reader",
    "WorkloadForm.groups": "several of the above over shared defaults",
    "ArrivalForm.rate_rps": "requests a second, sent whether or not earlier ones have ended",
    "ArrivalForm.process": "`poisson` when left out",
    "ArrivalForm.burstiness": "shape of the gamma process: 1 is Poisson, below 1 is burstier",
    "ArrivalForm.ramp_to_rps": "rate at the end; it rises evenly",
    "ArrivalForm.trace": "JSON lines in Mooncake's trace format, relative to the workload file",
    "ArrivalForm.speed": "2 replays a trace in half the time",
    "StreamForm.shape": "as in `shapes`, one",
    "StreamForm.requests": "requests of this stream",
    "StreamForm.concurrency": "clients of a closed loop",
    "StreamForm.think_s": "seconds that each client waits between its requests",
    "StreamForm.arrival": "an open loop or a trace instead of concurrency",
    "Slo.ttft_ms": "time to first token",
    "Slo.tpot_ms": "time per output token after the first",
    "Slo.e2e_ms": "time to last token",
    "Tolerances.overrides": "exceptions; the most specific wins, the later one among equals",
    "Override.metric": "glob over metric ids",
    "Override.workload": "glob over workloads",
    "Override.cell": "glob over cells",
    "Override.topology": "glob over topologies",
    "Override.tau": "relative: 0.05 is 5 %",
    "Override.floor": "absolute, in the metric's unit: smaller changes never count",
    "Override.reason": "for the next reader",
}
"""What keys are for that do not say it in their model. A key without either is an error."""

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py: edit the code instead. -->"


def table(head: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    """A Markdown table; pipes in cells are escaped."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def options() -> Iterator[str]:
    """pytest's options."""
    yield "# Options"
    yield ""
    yield "Precedence: command line, ini file, default. `pytest -h` shows the same."
    yield ""
    rows = (
        [
            f"`{option.flag}{' ' + option.metavar if option.metavar else ''}`",
            f"`{option.ini}`",
            f"`{option.default}`" if option.default not in (None, False) else "",
            option.help
            + (f". One of {', '.join(f'`{c}`' for c in option.choices)}" if option.choices else ""),
        ]
        for option in OPTIONS
    )
    yield from table(["option", "ini", "default", "what it does"], rows)


def metrics() -> Iterator[str]:
    """The metric table."""
    yield "# Metrics"
    yield ""
    yield f"Definitions `{DEFINITIONS}`. Streams beside the main one have `<stream>.` before the id."
    yield ""
    rows = (
        [
            metric.label,
            f"`{metric.id}`",
            metric.unit if metric.unit != "1" else "",
            "lower" if metric.direction > 0 else "higher",
            f"{metric.tau:.0%}" if metric.gated and metric.tau is not None else "",
            f"{metric.floor:g} {metric.unit}" if metric.gated and metric.floor else "",
            str(metric.min_n) if metric.min_n > 1 else "",
            metric.definition,
        ]
        for metric in METRICS.values()
    )
    yield from table(["metric", "id", "unit", "better", "tolerance", "floor", "n needed", "definition"], rows)
    yield "A metric without a tolerance is shown and never gated. Changes below the floor never count."


def verdicts() -> Iterator[str]:
    """Verdicts and exit statuses."""
    yield "# Verdicts and exit statuses"
    yield ""
    rows = ([f"{SYMBOLS[v]} `{v}`", row.meaning, row.blocks.value] for v, row in VERDICTS.items())
    yield from table(["verdict", "meaning", "turns its item red"], rows)
    yield "A cell takes the worst verdict of its metrics, in the order of this list from the bottom:"
    yield " < ".join(f"`{v}`" for v, _ in sorted(VERDICTS.items(), key=lambda pair: pair[1].rank)) + "."
    yield ""
    yield "## Exit status of pytest"
    yield ""
    yield from table(["status", "meaning"], ([str(status), words] for status, words in EXIT_MEANINGS.items()))
    yield "`pdperf` ends with 0, with 1 for bad news (a blocking verdict, a failed check), with 2 for bad input."


def cli() -> Iterator[str]:
    """The `pdperf` command."""
    parser = build_parser()
    yield "# Command line"
    yield ""
    yield "Runs are started with pytest. `pdperf` is for everything around them."
    yield ""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, sub in commands.choices.items():
        yield f"## pdperf {name}"
        yield ""
        yield f"{sub.description}"
        yield ""
        rows = (
            [_spelled(action), action.help or _choices(action)]
            for action in sub._actions
            if action.dest != "help"
        )
        yield from table(["argument", "what it does"], rows)
        yield "```bash"
        lines = [line.strip() for line in (sub.epilog or "").splitlines()]
        for line in lines:
            command, _, words = (part.strip() for part in line.partition("  "))
            if command.startswith(("pdperf ", "source ")):
                yield f"{command:<56} # {words}" if words else command
        yield "```"
        yield ""


def _spelled(action: argparse.Action) -> str:
    metavar = action.metavar or (
        action.dest.upper() if action.nargs != 0 and action.option_strings else action.dest
    )
    if not action.option_strings:
        return f"`{metavar}`"
    return f"`{action.option_strings[-1]}{f' {metavar}' if action.nargs != 0 else ''}`"


def _choices(action: argparse.Action) -> str:
    return "one of " + ", ".join(f"`{choice}`" for choice in action.choices or ())


def yaml_keys() -> Iterator[str]:
    """Keys of the three kinds of YAML files, from the models that validate them."""
    yield "# YAML keys"
    yield ""
    yield "Unknown keys and values out of range are errors that name file, line, key, value and the nearest valid key."
    yield ""
    sections: tuple[tuple[str, type[BaseModel], tuple[str, ...]], ...] = (
        ("Topology", Topology, ("name",)),
        ("Topology: a role", RoleSpec, ()),
        ("Topology: kv_transfer", KvTransfer, ()),
        ("Topology: router", RouterSpec, ()),
        ("Workload", WorkloadForm, ()),
        ("Workload: a group", GroupForm, ()),
        ("Workload: an arrival", ArrivalForm, ()),
        ("Workload: a stream", StreamForm, ()),
        ("Workload: slo", Slo, ()),
        ("Tolerances", Tolerances, ()),
        ("Tolerances: an override", Override, ()),
    )
    for title, model, hidden in sections:
        yield f"## {title}"
        yield ""
        yield (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ")
        yield ""
        words = described(model)
        rows = (
            [f"`{name}`", _type(field.annotation), _default(field), _notes(field, words.get(name, ""))]
            for name, field in model.model_fields.items()
            if name not in hidden
        )
        yield from table(["key", "type", "default", "notes"], rows)


def described(model: type[BaseModel]) -> dict[str, str]:
    """Field -> what it is for. Raises KeyError for a field that nobody described."""
    words = {
        key.partition(".")[2]: text
        for base in reversed(model.__mro__)
        for key, text in KEYS.items()
        if key.partition(".")[0] == base.__name__
    } | attribute_docstrings(model)
    missing = [
        name
        for name in model.model_fields
        if name not in words and f"{model.__name__}.{name}" != "Topology.name"
    ]
    if missing:
        raise KeyError(f"describe {model.__name__}.{missing[0]} in KEYS of docs/generate.py")
    return words


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Texts that stand below the fields of a model and its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (issubclass(base, BaseModel) and base is not BaseModel):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = " ".join(text.split())
    return found


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return ""
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, StrEnum):
            return " or ".join(f"`{member.value}`" for member in annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return "mapping"
        return {"str": "text", "int": "whole number", "float": "number", "bool": "true/false"}.get(
            getattr(annotation, "__name__", str(annotation)), "any"
        )
    if origin in (list, tuple):
        return f"list of {_type(args[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    if str(origin).endswith("Literal"):
        return " or ".join(f"`{value}`" for value in args)
    if str(origin).endswith("Annotated"):
        return _type(args[0])
    return " or ".join(dict.fromkeys(text for arg in args if (text := _type(arg))))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", (), [], {}) or isinstance(value, BaseModel):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _notes(field: FieldInfo, words: str) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {value:g}"
        for name, sign in signs.items()
        for constraint in field.metadata
        if (value := getattr(constraint, name, None)) is not None
    ]
    return "; ".join(part for part in (" and ".join(bounds), words.rstrip(".")) if part)


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "options.md": options,
    "metrics.md": metrics,
    "verdicts.md": verdicts,
    "cli.md": cli,
    "yaml.md": yaml_keys,
}


def pages() -> dict[Path, str]:
    """Path -> text of every generated page."""
    return {
        REFERENCE / name: NOTE + "\n\n" + "\n".join(make()).rstrip() + "\n" for name, make in PAGES.items()
    }


def main() -> int:
    """Write the pages, or with `--check` compare them. Returns 1 when a page is not current."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.name} is not current" if check else f"wrote {path.name}")
        if not check:
            path.write_text(pages()[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

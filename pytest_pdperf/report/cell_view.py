"""Everything that the page shows of one cell, built when its turn comes, so that one cell's stamps are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_pdperf.evidence.ttft_split import STAGES, TtftSplit
from pytest_pdperf.measure.table import METRICS, Metric

from .charts import Curve, Figure, ecdf, lanes, missing, stage_bars
from .gpu_view import gpu_figures
from .grid import Grid, Row, Series, best_of
from .heat import shown, tip
from .outcomes import CellOutcome
from .samples import Samples, read_samples
from .server_view import server_rows
from .source import Hole

ATTENTION = frozenset({"FAIL", "INVALID", "SUSPECT", "INCONCLUSIVE"})
"""Verdicts whose cells are shown unfolded."""


@dataclass(frozen=True, slots=True)
class NumberRow:
    """One metric over the series of a cell."""

    label: str
    unit: str
    values: tuple[tuple[str, str, bool], ...]
    """(text, tip, best) for each series."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell's part of the page."""

    number: int
    row: Row
    unfolded: bool
    charts: tuple[Figure, ...]
    stages: Figure | None
    """Stages of the TTFT, where an engine told them."""
    timelines: tuple[Figure, ...]
    gpus: tuple[Figure, ...]
    """Curves of the GPUs; none where no GPU was sampled."""
    server: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(label, definition, text of each series) of what the server side said."""
    numbers: tuple[NumberRow, ...]
    notes: tuple[str, ...]
    """Reasons why charts are missing, warnings, and what the client saw go wrong."""


def curve_of(series: Series, variant: int = 0, suffix: str = "") -> Curve:
    """Colour and dash of a column; launches of one topology differ by dash."""
    return Curve(f"{series.label} {suffix}".rstrip(), series.colour, variant + series.launch - 1)


def cell_views(grid: Grid) -> Iterator[CellView]:
    """One view a row, in order."""
    for number, row in enumerate(grid.rows):
        yield _view(number, row)


def _view(number: int, row: Row) -> CellView:
    samples: list[tuple[Series, Samples]] = []
    notes: list[str] = []
    for series, outcome in row.outcomes():
        notes += [f"{series.label}: {text}" for text in (*outcome.result.warnings, *_errors(outcome))]
        folder = series.run.samples_folder(outcome)
        if folder is None:
            continue
        found = read_samples(folder)
        if isinstance(found, Samples):
            samples.append((series, found))
        else:
            notes.append(f"{series.label}: {found}")
    verdicts = {outcome.verdict for _, outcome in row.outcomes()}
    broken = any(isinstance(entry, Hole) and series.run.holes for series, entry in row.entries)
    return CellView(
        number=number,
        row=row,
        unfolded=bool(verdicts & ATTENTION) or broken or number == 0,
        charts=tuple(_charts(row, samples)),
        stages=_stage_figure(row),
        timelines=tuple(_timelines(samples)),
        gpus=tuple(
            figure for series, outcome in row.outcomes() for figure in gpu_figures(outcome, series.label)
        ),
        server=tuple(server_rows([e if isinstance(e, CellOutcome) else None for _, e in row.entries])),
        numbers=tuple(_numbers(row)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _errors(outcome: CellOutcome) -> list[str]:
    return [f"{count} x {error}" for error, count in outcome.result.errors.items()]


def _charts(row: Row, samples: Sequence[tuple[Series, Samples]]) -> Iterator[Figure]:
    if samples:
        pairs = (("TTFT", "TTFT of a request", "ttft_ms"), ("ITL", "gap between token events", "itl_ms"))
        for title, what, stem in pairs:
            curves = [
                (curve_of(series, position, stream if len(found.streams) > 1 else ""), values)
                for series, found in samples
                for position, (stream, values) in enumerate(getattr(found, stem).items())
            ]
            yield Figure(
                f"{title} distribution",
                ecdf(curves, what),
                METRICS[f"{stem}_max"].definition.partition(": ")[2] + _dashes(samples),
            )


def _dashes(samples: Sequence[tuple[Series, Samples]]) -> str:
    """Which stream of a mixed workload is drawn how; empty where there is one."""
    streams = max((found.streams for _, found in samples), key=len)
    if len(streams) < 2:
        return ""
    kinds = ("solid", "dashed", "dotted")
    return "; " + ", ".join(f"{kind}: {name}" for kind, name in zip(kinds, streams, strict=False))


def _stage_figure(row: Row) -> Figure | None:
    splits = [(s, o.ttft_split) for s, o in row.outcomes() if o.ttft_split is not None]
    if not splits:
        return None
    bars = [(series.label, _stages(split)) for series, split in splits]
    words = "; ".join(f"{series.label}: {_closure(split)}" for series, split in splits)
    return Figure("Stages of the mean TTFT", stage_bars(bars, STAGES), words)


def _stages(split: TtftSplit) -> list[tuple[str, float, str]]:
    found = [
        (
            stage,
            ms,
            f"{stage.replace('_', ' ')}: {ms:.1f} ms of {split.measured_ms:.1f} ms, mean over the window",
        )
        for stage in STAGES
        if (ms := split.stages.get(stage)) is not None and ms > 0
    ]
    rest = split.closure_error_ms
    if rest > 0:
        found.append(("unexplained", rest, f"unexplained: {rest:.1f} ms that no stage accounts for"))
    return found


def _closure(split: TtftSplit) -> str:
    share = split.closure_share
    amount = f"{split.closure_error_ms:+.1f} ms" + (f" ({share:+.0%})" if share is not None else "")
    unknown = [stage.replace("_", " ") for stage in STAGES if split.stages.get(stage) is None]
    hidden = f"; not known: {', '.join(unknown)}" if unknown else ""
    return f"measured {split.measured_ms:.1f} ms, not explained {amount}{hidden}"


def _timelines(samples: Sequence[tuple[Series, Samples]]) -> Iterator[Figure]:
    span = max((found.span_ms for _, found in samples), default=0.0)
    for series, found in samples:
        if not found.lanes:
            yield Figure(f"Token timeline: {series.label}", missing("no request was sent"))
            continue
        words = [f"{len(found.lanes)} of {found.requests} requests"]
        if len(found.lanes) < found.requests:
            words.append("shown are failures, the slowest first tokens, and an even sample of the rest")
        if found.stall_ms:
            words.append(f"a stall is a gap above {found.stall_ms:.1f} ms, 5 x the median gap")
        if len(found.streams) > 1:
            words.append(f"streams, from strong to light: {', '.join(found.streams)}")
        yield Figure(
            f"Token timeline: {series.label}", lanes(found, curve_of(series), span), "; ".join(words)
        )


def _numbers(row: Row) -> Iterator[NumberRow]:
    """Every metric that at least one series has, streams of a mixed workload below the main one."""
    found = dict.fromkeys(name for _, outcome in row.outcomes() for name in outcome.result.metrics)
    place = {metric: position for position, metric in enumerate(METRICS)}
    for name in sorted(found, key=lambda n: (n.rpartition(".")[0], place.get(n.rpartition(".")[2], 0))):
        stream, _, bare = name.rpartition(".")
        metric = METRICS.get(bare)
        if metric is None:
            continue
        best = best_of(row, name) if name == bare else None
        values = [_number(series, entry, name, metric, best) for series, entry in row.entries]
        if any(text != "–" for text, _, _ in values):
            label = f"{stream}: {metric.label}" if stream else metric.label
            yield NumberRow(label, metric.unit if metric.unit != "1" else "", tuple(values))


def _number(
    series: Series, entry: CellOutcome | Hole, name: str, metric: Metric, best: Series | None
) -> tuple[str, str, bool]:
    if isinstance(entry, Hole):
        return "–", entry.reason, False
    value = entry.result.metrics.get(name)
    if value is None:
        return "–", f"not measured\n{metric.definition}", False
    return shown(value), tip(metric, value), best is series

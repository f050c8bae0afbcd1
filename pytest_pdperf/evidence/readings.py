"""Look a quantity up by meaning: the first known form on the page answers, a hole comes with its reason."""

from __future__ import annotations

import math

from .deltas import HistogramDelta, combine, counter_delta, gauge, histogram_delta
from .exposition import Snapshot, Unknown
from .names import EXTRA_QUEUES, FORMS, Form, Quantity


def engine_of(snapshot: Snapshot) -> str | None:
    """`vllm`, `sglang`, or None when the page is neither's."""
    for prefix in ("vllm", "sglang"):
        if any(name.startswith(f"{prefix}:") for name in snapshot.series):
            return prefix
    return None


def block_tokens(snapshot: Snapshot) -> int | Unknown:
    """Tokens in a KV block, from vLLM's `cache_config_info`."""
    sizes = {row.label("block_size") for row in snapshot.select("vllm:cache_config_info")}
    size = sizes.pop() if len(sizes) == 1 else None
    return int(size) if size is not None and size.isdecimal() else Unknown("block size is not on the page")


def _wire_name(form: Form) -> str:
    return f"{form.metric}_{form.part or 'count'}" if form.kind == "histogram" else form.metric


def find_form(snapshot: Snapshot, quantity: Quantity) -> Form | Unknown:
    """The form in which this page prints a quantity."""
    forms = FORMS[quantity]
    for form in forms:
        if form.absent_label_is_zero and snapshot.has(_wire_name(form)):
            return form
        if snapshot.select(_wire_name(form), form.where):
            return form
    engine = engine_of(snapshot)
    names = sorted({form.metric for form in forms if form.engine == engine})
    if engine is None:
        return Unknown(f"{quantity.value}: the page is of no known engine")
    if not names:
        return Unknown(f"{quantity.value}: {engine} prints no such metric")
    late = any(form.lazy for form in forms if form.engine == engine)
    hint = " (printed from its first increment on, or not at all)" if late else ""
    return Unknown(f"{quantity.value}: {' / '.join(names)} not on the page{hint}")


def change(before: Snapshot, after: Snapshot, quantity: Quantity) -> float | Unknown:
    """Increase of a quantity over a window, in bytes, seconds, tokens or requests."""
    form = find_form(after, quantity)
    if isinstance(form, Unknown):
        return form
    if form.kind == "gauge":
        return Unknown(f"{quantity.value}: {form.metric} is a gauge here, it holds the last value only")
    step = counter_delta(before, after, _wire_name(form), form.where, ranks=form.ranks, lazy=form.lazy)
    return Unknown(f"{quantity.value}: {step.reason}") if isinstance(step, Unknown) else step * form.scale


def level(snapshot: Snapshot, quantity: Quantity) -> float | Unknown:
    """Present value of a gauge-like quantity. WAITING includes every queue between the roles."""
    form = find_form(snapshot, quantity)
    if isinstance(form, Unknown):
        return form
    value = gauge(snapshot, form.metric, form.where, join=form.join)
    if isinstance(value, Unknown):
        return Unknown(f"{quantity.value}: {value.reason}")
    if quantity is Quantity.WAITING:
        for name in EXTRA_QUEUES:
            if snapshot.has(name):
                more = combine(snapshot.select(name))
                if isinstance(more, Unknown):
                    return Unknown(f"{quantity.value}: {name}: {more.reason}")
                value += more
    return value * form.scale


def observations(before: Snapshot, after: Snapshot, quantity: Quantity) -> HistogramDelta | Unknown:
    """Observations of a histogram quantity over a window; sums and bounds are in our units."""
    form = find_form(after, quantity)
    if isinstance(form, Unknown):
        return form
    if form.kind != "histogram":
        return Unknown(f"{quantity.value}: {form.metric} is no histogram")
    delta = histogram_delta(before, after, form.metric, form.where, ranks=form.ranks, lazy=form.lazy)
    if isinstance(delta, Unknown):
        return Unknown(f"{quantity.value}: {delta.reason}")
    return HistogramDelta(
        count=delta.count,
        total=delta.total * form.scale,
        buckets=tuple((bound * form.scale, seen) for bound, seen in delta.buckets),
    )


LOOKS = frozenset(
    (
        *(form.metric for q in (Quantity.RUNNING, Quantity.WAITING, Quantity.KV_USAGE) for form in FORMS[q]),
        *EXTRA_QUEUES,
        "vllm:cache_config_info",
        "sglang:num_pages",
    )
)
"""Series that tell whether an engine is idle: all that a look every second needs of a page."""


def kv_block_share(snapshot: Snapshot) -> float | None:
    """Share of the KV cache that one block takes (0..1), or None when the page does not tell."""
    for row in snapshot.select("vllm:cache_config_info"):
        blocks = row.label("num_gpu_blocks") or ""
        if blocks.isdigit() and int(blocks) > 0:
            return 1.0 / int(blocks)
    pages = combine(snapshot.select("sglang:num_pages"))
    if isinstance(pages, float) and math.isfinite(pages) and pages > 0:
        return 1.0 / pages
    return None

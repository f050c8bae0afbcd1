"""The columns of the raw file, so that its schema, its metadata and its page cannot say different things.

One row is a request: what a request has once stands once, and its events are lists, which every Parquet reader unnests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One column, as Parquet and as its reader wants it."""

    name: str
    kind: str
    """Arrow's name of the (element) type."""
    meaning: str
    unit: str = ""
    nullable: bool = False
    """Null is "not known"; no other value means that."""
    many: bool = False
    """A list: one entry an event, or a token."""
    delta: bool = False
    """Neighbours are near each other: stored as differences."""
    repeats: bool = False
    """Few values that come again and again: stored as a dictionary."""

    @property
    def path(self) -> str:
        """The leaf as Parquet names it."""
        return f"{self.name}.list.element" if self.many else self.name


IDENTITY = ("run", "engine", "topology", "launch", "workload", "cell")
"""Columns that are equal in all rows of a cell and no part of a request's record."""

COLUMNS = (
    Column("run", "string", "id of the run", repeats=True),
    Column("engine", "string", "engine of the topology", repeats=True),
    Column("topology", "string", "topology that was measured", repeats=True),
    Column("launch", "int64", "which bring-up of it, from 1", repeats=True),
    Column("workload", "string", "workload that the cell belongs to", repeats=True),
    Column("cell", "string", "cell: shape and load", repeats=True),
    Column("stream", "string", "traffic class within the cell", repeats=True),
    Column("index", "int64", "position of the request in its stream, warm-ups counted apart", delta=True),
    Column("warmup", "bool_", "sent before the clock started: leave it out of statistics"),
    Column("status", "string", "how it ended; only `ok` enters latency statistics", repeats=True),
    Column("planned_input_tokens", "int64", "prompt tokens that were planned", "tokens", repeats=True),
    Column("planned_output_tokens", "int64", "output tokens that were asked for", "tokens", repeats=True),
    Column(
        "prompt_tokens", "int64", "prompt tokens as the server counted them", "tokens", True, repeats=True
    ),
    Column(
        "completion_tokens", "int64", "output tokens as the server counted them", "tokens", True, repeats=True
    ),
    Column("output_tokens", "int64", "best count of output tokens there is", "tokens", True, repeats=True),
    Column(
        "token_count_source", "string", "where that count is from: usage, token_ids, chunks", repeats=True
    ),
    Column("sent_ns", "int64", "last moment before its bytes were handed to the kernel", "ns", delta=True),
    Column(
        "scheduled_ns",
        "int64",
        "when an open loop wanted it sent; null in a closed loop",
        "ns",
        True,
        delta=True,
    ),
    Column("end_ns", "int64", "[DONE], or end of the body", "ns", True, delta=True),
    Column("event_ns", "int64", "receive time of each token event", "ns", many=True, delta=True),
    Column("event_lag_ns", "int64", "how much later user space saw the event", "ns", many=True, delta=True),
    Column(
        "event_tokens",
        "int64",
        "tokens that the event carried, 0 = unknown",
        "tokens",
        many=True,
        repeats=True,
    ),
    Column("not_streamed", "bool_", "all tokens came in one read: TTFT, TPOT and ITL are unknown"),
    Column("finish_reason", "string", "as the server said it", nullable=True, repeats=True),
    Column("http_status", "int64", "of the answer", nullable=True, repeats=True),
    Column("error", "string", "one line on what went wrong; empty when nothing did", repeats=True),
    Column("request_id", "string", "as the server named it; empty when it did not"),
    Column("text", "string", "answer, where it was kept"),
    Column("token_ids", "int64", "token ids of the answer, where they were kept", many=True),
)

"""A part of a report that reads the same in every format: sentences, a table, and what its words mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """Plain text throughout: each format escapes it in its own way."""

    title: str
    lines: tuple[str, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What a newcomer has to know to read it."""

"""What engines say in their logs during a cell, and in no metric: a transfer that stands still, a failing library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from pytest_pdperf.spec.topology import Role

from .engine_lines import steady_gen_tps, transfer_stuck
from .kv_errors import glog_errors

_SHOWN = 160
"""Characters of a log line that a warning quotes."""


@dataclass(frozen=True, slots=True)
class LogFindings:
    """Findings of one cell's log lines; none where nothing was written or no log is there."""

    warnings: tuple[str, ...] = ()
    generation_tps: Mapping[str, float] = field(default_factory=dict)
    """Instance -> median tokens/s by SGLang's own progress lines, without those that divide by an idle gap."""


def read_log_findings(lines: Mapping[str, Sequence[str] | None], roles: Mapping[str, Role]) -> LogFindings:
    """Read the lines that each engine wrote during a cell. A finding is a warning: metrics and requests judge."""
    warnings: list[str] = []
    rates: dict[str, float] = {}
    for id, role in roles.items():
        rows = lines.get(id) or ()
        if role is not Role.PREFILL:
            if transfer_stuck(rows):
                warnings.append(
                    f"{id}: three progress lines in a row show requests that wait for KV and no token generated: "
                    "the KV transfer stood still"
                )
            if found := steady_gen_tps(rows):
                rates[id] = median(found)
        if errors := glog_errors(rows):
            first = f"{errors[0].source}: {errors[0].text}"[:_SHOWN]
            count = "an error" if len(errors) == 1 else f"{len(errors)} errors, first"
            warnings.append(f"{id}: Mooncake's transfer engine logged {count}: {first}")
    return LogFindings(tuple(warnings), rates)

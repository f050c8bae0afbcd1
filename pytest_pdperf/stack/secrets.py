"""Keeps tokens and keys out of logs, errors and reports. Standard library only: the reaper uses it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_?KEY(?:_ID)?|PRIVATE_?KEY)(?:$|_)",
    re.IGNORECASE,
)
_HARMLESS = re.compile(
    r"^(?:TOKENIZERS_PARALLELISM|.*_TOKENS?_(?:LIMIT|BUDGET|COUNT)|MAX_.*)$", re.IGNORECASE
)
_SHAPES = re.compile(
    r"(?P<lead>\b(?:authorization|proxy-authorization|x-api-key)['\"]?\s*[:=]\s*['\"]?(?:bearer\s+|basic\s+)?)"
    r"(?P<header>[^\s'\",;]{4,})"
    r"|(?P<bearer>\bbearer\s+)(?P<bearer_value>[A-Za-z0-9._~+/=-]{8,})"
    r"|(?P<flag>(?:--|\b)(?:api[-_]?key|hf[-_]?token|secret[-_]?key|password)['\"]?(?:\s*[:=]\s*|\s+)(?:\[)?['\"]?)"
    r"(?P<flag_value>(?!None\b|null\b|true\b|false\b)[^\s'\",;\]}]{4,})"
    r"|(?P<known>\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,}"
    r"|nvapi-[A-Za-z0-9_-]{16,}|xox[abps]-[A-Za-z0-9-]{10,}))"
    r"|(?P<url>://[^/\s:@]+:)(?P<url_value>[^@/\s]+)(?=@)",
    re.IGNORECASE,
)


def secret_values(environment: Mapping[str, str | None]) -> tuple[str, ...]:
    """Values that must not be printed, judged by the names of their variables; longest first."""
    values = {
        value
        for name, value in environment.items()
        if value and len(value) >= 6 and _NAME.search(name) and not _HARMLESS.match(name)
    }
    return tuple(sorted(values, key=len, reverse=True))


def mask(text: str, values: Iterable[str] = ()) -> str:
    """Replace known secret values, and whatever looks like a key, a token or a password in a URL."""
    for value in values:
        text = text.replace(value, MASK)
    return _SHAPES.sub(_masked, text)


def _masked(match: re.Match[str]) -> str:
    for lead in ("lead", "bearer", "flag", "url"):
        if match[lead] is not None:
            return f"{match[lead]}{MASK}"
    return MASK

"""Operating system errors by name, `ECONNREFUSED: Connection refused`: numbers tell nobody anything."""

from __future__ import annotations

import errno
import os


def name_of_code(code: int) -> str:
    """Name and text of an errno value."""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def name_of(problem: OSError) -> str:
    """The same for an exception, which may be one without a number."""
    name = errno.errorcode.get(problem.errno or 0, type(problem).__name__)
    return f"{name}: {problem.strerror or problem}"

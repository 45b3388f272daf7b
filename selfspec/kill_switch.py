"""The switches that leave requests to transformers' own loop, and nothing has to be restarted."""

from __future__ import annotations

import os

VARIABLE = "SELFSPEC_DISABLE"
_NO = ("", "0", "false", "no", "off")


def why_off(enabled: bool) -> str | None:
    """Why no request is to be speculated now, or None.

    Args:
        enabled: The wrapper's own switch. The other one is of all wrappers of a process: the
            environment variable `SELFSPEC_DISABLE`, which every request looks at.
    """
    if not enabled:
        return "it is switched off"
    value = os.environ.get(VARIABLE, "")
    return None if value.strip().lower() in _NO else f"{VARIABLE}={value} is set"

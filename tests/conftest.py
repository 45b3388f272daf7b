"""No test reads or leaves times of steps, but those that are about them."""

from __future__ import annotations

import os

os.environ["SELFSPEC_CACHE"] = ""

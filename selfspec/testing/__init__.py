"""For the tests of those who write a drafter. `selfspec` itself imports none of it."""

from selfspec.testing.check import DrafterReport, check_drafter
from selfspec.testing.watch import DrafterError

__all__ = ["DrafterError", "DrafterReport", "check_drafter"]

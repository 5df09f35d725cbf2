"""Wall-clock time that never goes back: durations are differences of it, whatever is done to the system's clock.

All processes of a machine share `monotonic`; what one has measured by it, `at` makes a time for another.
"""

import time
from time import monotonic

_OFFSET = time.time() - monotonic()

__all__ = ["at", "monotonic", "now"]


def at(moment: float) -> float:
    """Seconds since the Unix epoch at a moment that `monotonic` gave in any process of this machine."""
    return _OFFSET + moment


def now() -> float:
    """Seconds since the Unix epoch, as they were counted when this process began, and have gone on since."""
    return at(monotonic())

"""One line about where numbers come from, to print above them."""

from __future__ import annotations

import os
import platform


def line() -> str:
    """CPUs, load and versions of this machine now."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} CPUs, load {load}, Linux {platform.release()}, Python {platform.python_version()}"

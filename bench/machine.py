"""Describe the machine in one line, to print it above measured numbers."""

from __future__ import annotations

import os
import platform


def line() -> str:
    """Return CPUs, present load and versions of this machine."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} CPUs, load {load}, Linux {platform.release()}, Python {platform.python_version()}"

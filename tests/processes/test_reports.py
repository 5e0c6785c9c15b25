"""Cost of progress reports for the operator (bench/reports.py), at a size that a test can afford."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench/reports.py"


def test_reports_of_many_jobs_are_accepted_and_write_few_statuses() -> None:
    """Reports of many jobs must be accepted with few writes of statuses, although each has its own connection."""
    command = [sys.executable, str(BENCH), "--jobs", "40", "--seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["answers"]) - {"TimeoutError"} == {"204"}, "none is refused; a machine may be too busy to answer"
    assert found["answers"]["204"] >= 40
    assert found["statusWritesPerSecond"] <= 12, "10, and what else there is to say of a job"

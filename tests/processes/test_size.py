"""The operator's memory for a large cluster, and the time that a new leader needs (bench/size.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench/size.py"


def measured(jobs: int) -> dict[str, Any]:
    """Measure in a new process, whose memory no other test has used."""
    command = [sys.executable, str(BENCH), "--jobs", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_thousand_pods_cost_a_few_megabytes() -> None:
    """A thousand pods must cost a few megabytes: above its memory limit the operator is killed again and again."""
    found = measured(125)
    assert found["pods"] == 1_000
    assert found["memoryMiBPeak"] - found["memoryMiBEmpty"] <= 15


@pytest.mark.long
def test_with_ten_thousand_pods_memory_stays_small_and_a_new_leader_acts_within_two_seconds() -> None:
    """With ten thousand pods memory must stay small, and a new leader act within two seconds of CPU time."""
    found = measured(1_250)
    assert found["pods"] == 10_000
    assert found["memoryMiBPeak"] <= 150
    assert found["cpuSecondsOfTheFirstPass"] <= 2

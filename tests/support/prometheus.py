"""A real Prometheus process for a test, from Debian's package `prometheus`. Its service is never used."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_port import free_port

INSTALLED = shutil.which("prometheus") is not None and shutil.which("promtool") is not None
needs_prometheus = pytest.mark.skipif(
    not INSTALLED,
    reason="prometheus and promtool are not on the PATH: apt-get install --no-install-recommends prometheus",
)


class Prometheus:
    """A Prometheus that scrapes one target every second. Use it as a context manager."""

    def __init__(self, folder: Path, target: str, rules: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = (folder / "prometheus.log").open("wb")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": "ddpjob", "honor_labels": True, "static_configs": [{"targets": [target]}]},
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._log.close()

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer of Prometheus' API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the result of an instant query without NaN values."""
        result = self.get("query", query=expression)["result"]
        return [series for series in result if series["value"][1] != "NaN"]


def until(is_true: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Wait for a condition. A connection error counts as false."""
    end = time.monotonic() + seconds
    while True:
        try:
            if is_true():
                return
        except OSError:
            pass
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)

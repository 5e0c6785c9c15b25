"""Pages in a real browser, without the internet."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def drawn(url: str, profile: Path) -> str:
    """Return the page's HTML after its scripts have run. Fail if a script fails, or the page's policy blocks one."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed here (Debian: chromium); other tests read the files themselves")
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, f"--user-data-dir={profile}", "--dump-dom", url], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert errors == [], "errors of the page"
    return done.stdout


def site(folder: Path) -> Path:
    """Build the documents as a site, as `make docs` does."""
    pytest.importorskip("mkdocs", reason="make docs installs mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(words, check=True, cwd=Path(__file__).parents[2], timeout=300)
    return folder

"""Fixtures: a fake API server, and `ddpjob` in this process with that server."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_cluster import FakeCluster, fake_cluster
from shell import Ddpjob, Done

from ddpjob_cli.client import logs, stacks, watch
from ddpjob_cli.commands.main import main


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Return a fake API server. The client's polling intervals are a tenth of the real ones, so that tests are fast."""
    for module, name in ((logs, "RETRY_SECONDS"), (stacks, "POLL_SECONDS"), (watch, "LOOK_SECONDS")):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    with fake_cluster(tmp_path) as (made, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield made


@pytest.fixture
def ddpjob(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ddpjob:
    """Return a function that runs `ddpjob …` and checks its exit code and, if given, texts on stderr."""

    def run(*words: object, name: str = "ddpjob", code: int | None = None, says: str | Sequence[str] = ()) -> Done:
        monkeypatch.setattr(sys, "argv", ["ddpjob", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main(name)
        done = Done(int(ended.value.code or 0), *capfd.readouterr())
        assert "Traceback" not in done.err, done.err
        assert code in (None, done.code), done.err
        for text in [says] if isinstance(says, str) else says:
            assert text in done.err
        return done

    return run

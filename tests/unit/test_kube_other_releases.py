"""A release for all namespaces ignores each namespace that another release has marked with a ConfigMap."""

import asyncio
from collections.abc import AsyncIterator, Set
from typing import cast

import pytest
from slow_server import play

from ddpjob_operator.kube.api.client import ApiError, Client, Page
from ddpjob_operator.kube.operator import UNSYNCED_SECONDS, Operator
from ddpjob_operator.kube.other_releases import MARK, READ_SECONDS, OtherReleases
from ddpjob_operator.kube.settings import OperatorSettings

KEY = ("team", "digits")


class Marks:
    """API server with a mark (a ConfigMap) of each given release in the namespace that it handles."""

    def __init__(self, **releases: str) -> None:
        self.releases, self.error = releases, ApiError(0, "NoAnswer", "away")
        self.fails = False

    async def pages(self, path: str, selector: str = "", field_selector: str = "") -> AsyncIterator[Page]:
        assert (path, selector, field_selector) == ("/api/v1/configmaps", "", f"metadata.name={MARK}")
        if self.fails:
            raise self.error
        for namespace, release in self.releases.items():
            yield Page([{"metadata": {"name": MARK, "namespace": namespace}, "data": {"release": release}}], "1")


class World:
    """Operator for all namespaces that reads the marks of other releases."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.others = OtherReleases(cast(Client, marks))
        self.operator = Operator(OperatorSettings(), Client(), others=self.others)
        for reflector in self.operator.reflectors:
            reflector.synced.set()
        self.changes: list[Set[str]] = []

    def begins(self) -> None:
        """Start the task that regularly reads the ConfigMaps of other releases."""
        self.running = asyncio.create_task(self.others.run(self.changes.append))

    async def reads(self) -> float | None:
        """Wait until the ConfigMaps were read again, then reconcile. Return the seconds until the next reconcile."""
        await asyncio.sleep(READ_SECONDS + 1)
        return await self.operator.reconciler.reconcile(KEY)


def test_a_namespace_with_its_own_release_is_left_alone_until_that_release_is_gone(caplog):
    """A namespace with its own release must be left alone, or both releases restart its jobs and delete their pods."""
    marks = Marks(team="team/theirs")

    async def story() -> None:
        world = World(marks)
        assert await world.operator.reconciler.reconcile(KEY) == UNSYNCED_SECONDS, "it has not looked yet"
        world.begins()
        assert await world.reads() is None
        assert world.operator.standing_by() == (
            "the release team/theirs manages the jobs of the namespace team (ConfigMap team/training.ddpjob.io);"
            " this release leaves them alone"
        )
        assert world.others.of("other") == ""
        assert world.changes == [{"team"}]
        marks.fails = True
        assert await world.reads() is None
        assert world.others.of("team") == "team/theirs", "a server that is away changes nothing"
        marks.fails, marks.releases = False, {}
        await world.reads()
        assert (world.operator.standing_by(), world.changes) == ("", [{"team"}, {"team"}])

    play(story)
    assert "this release leaves them alone" in caplog.text


def test_a_release_that_may_not_read_the_marks_acts_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """A release that may not read the marks must act and log it: two active releases are better than none."""
    marks = Marks(team="team/theirs")
    marks.fails, marks.error = True, ApiError(403, "Forbidden", "cannot list configmaps")

    async def story() -> None:
        world = World(marks)
        world.begins()
        await world.reads()
        await world.reads()
        assert (world.others.are_known, world.changes) == (True, [])

    play(story)
    assert caplog.text.count("cannot list configmaps") == 1


def test_the_mark_of_a_tenant_affects_only_jobs_of_its_own_namespace(caplog: pytest.LogCaptureFixture) -> None:
    """A tenant's mark must affect only jobs of its own namespace, however often it changes."""
    marks = Marks(team="a")

    async def story() -> None:
        world = World(marks)
        world.begins()
        for release in ("b", "c\x1b]0;x\x07\nERROR: forged", "", "x" * 100_000):
            await world.reads()
            marks.releases = {"team": release}
            await world.reads()
            assert world.others.of("team"), "it is left alone whatever the mark holds"
            assert len(world.operator.standing_by()) < 400
        assert world.changes == [{"team"}]

    play(story)
    assert "\x1b" not in caplog.text
    assert "release c ERROR: forged manages" in caplog.text

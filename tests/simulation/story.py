"""A run as a readable log: decisions of the operator, its writes and Events, and what happens to its pods."""

from __future__ import annotations

from typing import Any

from model_api import Change, Kind, Raw
from simulation import Simulation

from ddpjob_operator.job import api


def tell(simulation: Simulation) -> list[str]:
    """Run the simulation to its end; return the lines of its story."""
    story = _Story(simulation)
    outcome = simulation.run()
    assert not outcome.wrong, "\n".join([*story.lines, *outcome.wrong])
    return story.lines


class _Story:
    def __init__(self, simulation: Simulation) -> None:
        self.lines: list[str] = []
        self._loop = simulation.loop
        self._message = ""
        simulation.api.listeners.append(self._changed)
        simulation.on_deed = self._say
        simulation.on_event = self._event

    def _say(self, text: str) -> None:
        self.lines.append(f"t+{self._loop.time():<6.1f} {text}")

    def _event(self, body: Raw) -> None:
        text = "the same message" if body["message"] == self._message else body["message"]
        self._say(f"event {body['type']} {body['reason']}: {text}")

    def _changed(self, kind: Kind, change: Change) -> None:
        if kind.plural == api.PLURAL:
            self._job(change)
        elif kind.plural in ("pods", "services"):
            self._object(kind.kind.lower(), change)

    def _job(self, change: Change) -> None:
        old, new = ((raw or {}).get("status") or {} for raw in (change.old, change.new))
        if change.new is None:
            self._say("job digits is gone")
        elif change.old is None:
            self._say("user applies job digits")
        for line in _decisions(change.new or {}, old, new):
            self._say(line)
        if any(old.get(field) != new.get(field) for field in ("state", "reason", "message")):
            self._message = new.get("message", "")
            self._say(f"status {new.get('state')}/{new.get('reason')}: {self._message}")

    def _object(self, kind: str, change: Change) -> None:
        name = f"{kind} {change.object['metadata']['name']}"
        if change.old is None:
            self._say(f"create {name}")
        elif change.new is None:
            self._say(f"{name} is gone")
        elif _is_deleted(change.new) and not _is_deleted(change.old):
            grace = change.new["metadata"]["deletionGracePeriodSeconds"]
            self._say(f"{change.actor.partition('-')[0]} deletes {name}, grace {grace} s")
        elif kind == "pod" and (state := _pod_state(change.new)) != _pod_state(change.old):
            self._say(f"{name} {state}")


def _is_deleted(raw: Raw) -> bool:
    return "deletionTimestamp" in raw["metadata"]


def _pod_state(raw: Raw) -> str:
    status = raw.get("status") or {}
    states = [container["state"] for container in status.get("containerStatuses") or ()]
    codes = [state["terminated"]["exitCode"] for state in states if "terminated" in state]
    reason = f" ({status['reason']})" if status.get("reason") else ""
    code = f", exit code {codes[0]}" if codes else ""
    state = "scheduled" if status.get("phase") == "Pending" else str(status.get("phase"))
    return f"{state}{reason}{code} on {raw['spec'].get('nodeName', 'no node')}"


def _decisions(job: Raw, old: Raw, new: Raw) -> list[str]:
    """Return a line for each new attempt and each replaced pod that a new status shows."""
    before, after = old.get("attempt", 0), new.get("attempt", 0)
    lines = []
    if after > before and (charged := _restarts(new) - _restarts(old)):
        lines.append(f"restart group, attempt {before} -> {after}: {_cause(job, new, charged)}")
    elif after > before:
        lines.append(f"start attempt {after}")
    for rank, count in (new.get("replacements") or {}).items():
        if count > (old.get("replacements") or {}).get(rank, 0):
            lines.append(f"replace the pod of node {rank}: {_cause(job, new, _restarts(new) - _restarts(old))}")
    return lines


def _restarts(status: Raw) -> int:
    return int((status.get("restarts") or {}).get("total", 0))


def _cause(job: Raw, status: Raw, charged: int) -> str:
    failure: dict[str, Any] = status.get("lastFailure") or {}
    charged_to = failure.get("chargedTo", "nothing") if charged else "nothing"
    limit = f" of {job['spec'].get('backoffLimit', 3)}" if charged_to == "application" else ""
    what = f"exit code {failure['exitCode']}" if "exitCode" in failure else failure.get("reason", "")
    count = (status.get("restarts") or {}).get(charged_to, 0)
    rank = failure.get("rank", failure.get("nodeRank"))
    return f"{what} on rank {rank}, charged to {charged_to}, restart {count}{limit}"

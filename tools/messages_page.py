"""Write docs/messages.md from the reasons that the operator and the local run use."""

from __future__ import annotations

import sys

from ddpjob_operator.job import reasons
from reference_page import escaped, table

INTRO = """\
<!-- Written from job/reasons.py by `python tools/messages_page.py`. Change the reasons, then run it again. -->
# Messages

Each state of a job, and each Event, has a reason: one word. The sentence beside it says who, what, since when, and
what happens next.

| Where | Shows |
| --- | --- |
| `kubectl get ddp -o wide` | reason and message of the present state |
| `kubectl get ddp -A --field-selector status.reason=Unschedulable` | the jobs with this reason (Kubernetes 1.31) |
| `kubectl describe ddp NAME` | the Events of the last hour, and the conditions |
| `kubectl get ddp NAME -o jsonpath='{.status.lastFailure}'` | the last failure: which rank, how, and why |
| `ddpjob run` | the same reasons and sentences, on stderr |
| the operator's log | a line for each change of state or reason |

A condition has the reason of the state that it describes. One that is not true has `Not` and its type (`NotFailed`);
Accepted has `Valid`, `InvalidSpec` or `UnreadableStatus`.

## Reasons
"""
LINKS = """\
By symptom, and by the words of an error: [failures.md](failures.md).
"""


def to_markdown() -> str:
    """Return docs/messages.md."""
    head = ("Reason", "Event", "When", "What to do")
    return "\n".join((INTRO, table(head, (_row(reason) for reason in reasons.ALL.values())), LINKS))


def _row(reason: reasons.Reason) -> tuple[str, str, str, str]:
    kind = "Warning" if reason.warning else "Normal"
    return f"`{reason.name}`", kind, escaped(reason.when), escaped(reason.todo) or "–"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())

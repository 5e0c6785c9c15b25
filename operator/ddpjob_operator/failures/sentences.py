"""Describes a failure in a sentence, or in a few words."""

from __future__ import annotations

import re

from ddpjob_core import rules
from ddpjob_operator.failures import root_cause
from ddpjob_operator.job import api, wording
from ddpjob_operator.observed.cluster import THIS_MACHINE

_SIGKILL = 137
# The path of torch's build machine: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
_BUILD_PATH = re.compile(r"\[(?:[\w.-]*/){2,40}[\w.-]+:\d{1,6}\] ?")
_PICTURES = re.compile(r"(?: ?GLHF!)? ?[\U0001f000-\U0001ffff\u2600-\u27bf\ufe0f\u200d]+")
_SPACES = re.compile(r" {2,}")


def sentence(failure: api.JobFailure) -> str:
    """Return for example `rank 37 (pod bert-1-4, node gpu-07) was killed by SIGSEGV at step 12840`; in a local run
    `rank 37 (node 4) …`.
    """
    if failure.init_container:
        logs = f"kubectl logs {failure.pod} -c {failure.init_container}"
        return f'init container "{failure.init_container}" of pod {failure.pod} {_what(failure)}, see {logs}'
    if failure.node == THIS_MACHINE:
        where = "" if failure.rank is None else f" (node {failure.node_rank})"
    else:
        where = f" (pod {failure.pod}" + (f", node {failure.node})" if failure.node else ")")
    return f"{root_cause.who(failure)}{where} {_what(failure)}"


def short(failure: api.JobFailure) -> str:
    """Return the failure in a few words, such as `SIGSEGV on rank 37`, for "attempt 3 after …"."""
    where = f"node {failure.node or failure.node_rank}"
    by_reason = {
        root_cause.NODE_LOST: f"{where} lost",
        root_cause.GONE: f"{failure.pod} vanished",
        root_cause.UNFIT: "a pre-flight that found a bad node",
        root_cause.CONNECTION_LOST: f"a lost connection to node {failure.node_rank}",
        root_cause.STALLED: f"stall of {root_cause.who(failure)}",
        root_cause.STOPPED: f"{failure.pod} was stopped from outside",
        root_cause.RESUMABLE: "a stop from outside",
        root_cause.PEER_LOST: f"a timeout of {root_cause.who(failure)}"
        if rules.has_timed_out(failure.exception)
        else f"{root_cause.who(failure)} lost its peers",
        root_cause.ENDED_EARLY: f"an early end of {root_cause.who(failure)}",
        "SupervisorLost": f"node {failure.node_rank} lost",
        "PreemptionByScheduler": f"preemption of {failure.pod}",
        "Evicted": f"eviction of {failure.pod}",
        "EvictionByEvictionAPI": f"eviction of {failure.pod}",
        "DeletionByTaintManager": f"a taint on {where}",
        "DeletionByPodGC": f"{where} lost",
        "TerminationByKubelet": f"the kubelet of {where} ended {failure.pod}",
        **dict.fromkeys(rules.LOST_CONTAINER, f"a restart of {where}"),
        rules.POD_DEADLINE: f"the activeDeadlineSeconds of {failure.pod}",
        root_cause.CONFIG_ERROR: f"a missing ConfigMap or Secret of {failure.pod}",
    }
    if failure.reason in by_reason:
        return by_reason[failure.reason]
    if failure.reason == "OOMKilled" or failure.exit_code is None:
        return f"{failure.reason or 'a failure'} on {root_cause.who(failure)}"
    of = "of" if failure.init_container else "on"
    return f"{failure.signal or f'exit code {failure.exit_code}'} {of} {root_cause.who(failure)}"


def shortened(text: str) -> str:
    """Return the text without emojis and paths of gloo's source files; `lastFailure` keeps the full text."""
    return _SPACES.sub(" ", _PICTURES.sub("", _BUILD_PATH.sub("", text))).strip()


def avoided(node: api.AvoidedNode) -> str:
    """Return for example `node gpu-07 is avoided until 08:04:28 UTC (2 failures of this job)`."""
    if node.lifted:
        return f"node {node.node} is used although it was to be avoided ({node.message}): pods fit on no other node"
    return f"node {node.node} is avoided until {wording.clock(node.until)} ({node.message})"


def _what(failure: api.JobFailure) -> str:
    """Return what happened. The text describes the reason if that explains more than the exit code."""
    at, why = _at(failure), _why(failure)
    if failure.reason == root_cause.ENDED_EARLY:
        return failure.exception
    if failure.reason == root_cause.STALLED:
        return failure.exception or f"has made no step{at}"
    if failure.reason == root_cause.PEER_LOST:
        return _complaint(failure)
    if failure.reason == "OOMKilled":
        limit = failure.exception.partition(";")[0].removeprefix(root_cause.MEMORY)
        known = f" of {limit} (resources.limits.memory)" if failure.exception.startswith(root_cause.MEMORY) else ""
        return f"was killed{at} because it used more memory than its limit{known} (OOMKilled)"
    if failure.reason in _PHRASES:
        what, colon, because = _PHRASES[failure.reason].format(code=_code(failure)).partition(":")
        return what + at + colon + because + why
    return _how_it_ended(failure)


def _complaint(failure: api.JobFailure) -> str:
    """Return a rank's error about a lost or missing peer as text."""
    at, why = _at(failure), _why(failure)
    if rules.port_in_use(failure.exception) is not None:
        return f"could not listen on the address of the rendezvous{why}"
    node = root_cause.evidence_of(failure).silent_node
    means = "" if node else ": often the ranks have different numbers of batches, and ddprun names the rank"
    what = "lost its peers"
    if rules.have_never_met(failure.exception):
        what = "waited for the other nodes until its timeout"
        means = ": one has not started, or a launcher does not have the job's address and PET_NNODES (--standalone)"
    elif rules.has_timed_out(failure.exception):
        what = "waited for another rank until its timeout"
        means = ": one hangs, is slower than that, or does not call the same collectives"
    network = f"; node {node} did not report for a while, so its network may have failed" if node else ""
    return f"{what}{at}{why}; no rank failed first{means}{network}"


def _how_it_ended(failure: api.JobFailure) -> str:
    at, why = _at(failure), _why(failure)
    if failure.exit_code is None:
        return f"failed{at} ({failure.reason or 'no exit code'})" + (f": {failure.exception}" if why else "")
    if failure.reason in rules.START_REASONS:
        return f"could not be started: {failure.exception or failure.reason}"
    how = f"was killed by {failure.signal}" if failure.signal else f"ended with exit code {failure.exit_code}"
    unreported = " (no out-of-memory kill was reported)" if failure.exit_code == _SIGKILL else ""
    hidden = ", although the command ended with 0" if root_cause.evidence_of(failure).hidden else ""
    return how + at + (f" in {failure.where}" if failure.where else "") + unreported + why + hidden


def _at(failure: api.JobFailure) -> str:
    return "" if failure.step is None else f" at step {failure.step}"


def _why(failure: api.JobFailure) -> str:
    full = "most likely a full disk: " if rules.WRITE_CUT_SHORT.search(failure.exception) else ""
    return f" ({full}{shortened(failure.exception)})" if failure.exception else ""


def _code(failure: api.JobFailure) -> str:
    return "" if failure.exit_code is None else f" (exit code {failure.exit_code})"


_PHRASES = {
    root_cause.GONE: "vanished while it ran: someone deleted the pod, or its node is gone",
    root_cause.NODE_LOST: "was lost with its node",
    root_cause.DEADLINE: "was still running: the activeDeadlineSeconds of the job are over",
    root_cause.UNFIT: "did not begin to train",
    root_cause.CONNECTION_LOST: "lost its connection to node 0 and has come back",
    **dict.fromkeys(rules.LOST_CONTAINER, "was lost{code}: its node was restarted"),
    root_cause.STOPPED: "was stopped from outside{code}: the pod was deleted, or its node drained",
    root_cause.RESUMABLE: "stopped cleanly{code} because a rank was told to stop",
    "SupervisorLost": "was lost: the process that started its ranks on this machine is gone",
    "Evicted": "was evicted by the kubelet",
    rules.POD_DEADLINE: "was ended{code}: the activeDeadlineSeconds of the pod's template are over",
    **root_cause.DISRUPTIONS,
}

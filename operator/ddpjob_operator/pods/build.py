"""Builds the objects that the operator creates. A local run starts the same pods as processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ddpjob_operator.job import api
from ddpjob_operator.job.podspec import TRAINER, quantity, restarts_of_the_kubelet, trainer_container
from ddpjob_operator.pods import agent_environment, naming, report_token
from ddpjob_operator.pods import environment as contract

Body = dict[str, Any]

# Size of /dev/shm: half of the memory limit, as tmpfs takes half of the RAM; without a limit, enough for data loaders.
# The container runtime's 64 MiB breaks DataLoader workers and NCCL.
SHM_BYTES_DEFAULT = 2 * 2**30
_LOG_AS_MESSAGE = "FallbackToLogsOnError"
KEEP_FROM_AUTOSCALERS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}


# Matches a path below a pod's spec as the API server writes it, but not within a longer path or word.
_POD_PATH = re.compile(
    r"(?<![\w.])spec\.(?:containers\[(?P<container>\d{1,4})\](?P<env>\.env\[(?P<number>\d{1,6})\])?|(?=[a-zA-Z]))"
)


@dataclass(frozen=True)
class Reporting:
    """Where and how often trainers report: address, token, interval."""

    url: str
    token_file: str = report_token.TOKEN_FILE
    interval_seconds: float | None = None
    """None: the library's own interval."""

    def environment(self) -> dict[str, str]:
        given = self.interval_seconds
        interval = {} if given is None else {"DDPJOB_STATUS_INTERVAL": f"{given:g}"}
        return report_token.environment(self.url, self.token_file) | interval


def service(job: api.DDPJob) -> Body:
    """Build the headless Service that gives node 0 a DNS name, or all pods if spec.dns requires that. Selecting only
    node 0 is cheaper, because each change of a selected pod rewrites an EndpointSlice with all of them."""
    leader = {} if job.spec.facts.all_have_dns_names else {naming.LABEL_RANK: str(job.spec.members.leader)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned_metadata(job, job.metadata.name, naming.labels(job)),
        "spec": {
            "clusterIP": "None",
            # Names must resolve before the pods are ready, because readiness may depend on the rendezvous.
            "publishNotReadyAddresses": True,
            "selector": naming.labels(job) | leader,
        },
    }


def pod(
    job: api.DDPJob,
    attempt: int,
    place: int,
    rendezvous: naming.Endpoint | None = None,
    reporting: Reporting | None = None,
    avoid: Sequence[str] = (),
    replacement: int = 0,
    *,
    keep_from_autoscalers: bool = True,
    mount_api_token: bool = True,
) -> Body:
    """Build a pod of `attempt`. place: the number in its name.

    rendezvous: None uses the Service's name, as in a cluster. avoid: nodes that it must not run on. replacement: number
    of the pod at this place. keep_from_autoscalers: ask autoscalers to keep its node, unless the template's annotations
    differ. mount_api_token: False mounts no API token unless the template requests it.
    """
    # spec.nodes of an elastic job may differ from the number of its attempt, which its queue may also have limited.
    job = replace(job, spec=job.spec.with_nodes(job.status.attempt_nodes or job.spec.nodes))
    rendezvous = rendezvous or naming.endpoint(job, attempt)
    template = as_given(job.spec.template)
    spec: Body = template["spec"]
    given = template.get("metadata") or {}
    trainer = (trainer_container(template) or {}).get("name", TRAINER)
    labels = {
        # Drop our labels from a template that was copied from a pod.
        **{name: value for name, value in (given.get("labels") or {}).items() if name not in naming.LABELS},
        **naming.labels(job),
        naming.LABEL_ATTEMPT: str(attempt),
        naming.LABEL_RANK: str(place),
        **({naming.LABEL_REPLACEMENT: str(replacement)} if replacement else {}),
        **({} if trainer == TRAINER else {naming.LABEL_TRAINER: str(trainer)}),
    }
    metadata = owned_metadata(job, naming.pod_name(job, attempt, place, replacement), labels)
    metadata["annotations"] = (KEEP_FROM_AUTOSCALERS if keep_from_autoscalers else {}) | (
        given.get("annotations") or {}
    )
    for container, field in restarts_of_the_kubelet(template):
        del container[field]
    spec.update(restartPolicy="Never", hostname=naming.hostname(job, place), subdomain=job.metadata.name)
    spec.setdefault("enableServiceLinks", False)
    if not mount_api_token and spec.get("automountServiceAccountToken") is None:
        spec["automountServiceAccountToken"] = False
    if spec.get("terminationGracePeriodSeconds") == 0:
        # With a grace period of 0, a deletion removes the object before the kubelet has stopped the containers.
        spec["terminationGracePeriodSeconds"] = 1
    environment = contract.environment(job, attempt, place, rendezvous) | agent_environment.environment(
        job, replacement
    )
    _trainer(environment | (reporting.environment() if reporting else {}), spec)
    for container in spec.get("initContainers") or ():
        container.setdefault("terminationMessagePolicy", _LOG_AS_MESSAGE)
    if reporting is not None and reporting.token_file == report_token.TOKEN_FILE:
        report_token.add_token(spec, trainer_container({"spec": spec}) or {})
    _shared_memory(spec)
    _spread(job, spec)
    _stay_away(spec, avoid)
    _host_network(spec, rendezvous)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def in_users_words(message: str, body: Body, job: api.DDPJob) -> str:
    """Translate paths in an API server's message about a pod into paths of the user's template. In env the
    operator's variables come before the user's; in other lists they follow."""
    trainer = trainer_container(job.spec.template) or {}
    containers = body["spec"]["containers"]
    index = next((i for i, c in enumerate(containers) if c["name"] == trainer.get("name")), 0)
    own = len(containers[index].get("env") or ()) - len(contract.user_environment(trainer))

    def translated(match: re.Match[str]) -> str:
        env, number = match["env"], int(match["number"] or 0)
        if env is None or int(match["container"]) != index or number < own:
            return f"spec.template.{match[0]}"
        return f"spec.template.spec.containers[{index}].env[{number - own}]"

    return _POD_PATH.sub(translated, message)


def wants_one_pod_per_node(spec: api.Spec) -> bool:
    """True if pods of the job must not share a node. `auto` means true for a job with GPUs."""
    return spec.facts.gpus > 0 if spec.one_pod_per_node == "auto" else spec.one_pod_per_node


def as_given(value: Any) -> Any:
    """Copy a part of a template without nulls: for the API server a null field is unset. Lists keep their length, so
    that messages show the user's index.
    """
    if isinstance(value, Mapping):
        return {name: as_given(one) for name, one in value.items() if one is not None}
    return [as_given(one) for one in value] if isinstance(value, list) else value


def owned_metadata(job: api.DDPJob, name: str, labels: dict[str, str]) -> Body:
    """Build the metadata of an object that is deleted with the job."""
    owner = {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        # blockOwnerDeletion is not set, because it requires the right to update the job's finalizers.
        "controller": True,
    }
    return {"name": name, "namespace": job.metadata.namespace, "labels": labels, "ownerReferences": [owner]}


def _trainer(own: dict[str, str], spec: Body) -> None:
    trainer = trainer_container({"spec": spec})
    assert trainer is not None, "validation refuses a template without a container"
    users = contract.user_environment(trainer)
    names = {entry["name"] for entry in users}
    # The operator's variables come first, so that the user's values can refer to them: WORLD_SIZE: $(NNODES).
    trainer["env"] = [{"name": name, "value": value} for name, value in own.items() if name not in names] + users
    # On failure the kubelet puts the end of the log into the pod's status. So the operator needs no right to read logs.
    trainer.setdefault("terminationMessagePolicy", _LOG_AS_MESSAGE)


def _shared_memory(spec: Body) -> None:
    trainer = trainer_container({"spec": spec}) or {}
    mounts = trainer.get("volumeMounts") or []
    if any(str(m.get("mountPath", "")).rstrip("/") == "/dev/shm" for m in mounts):  # noqa: S108 - a mount, not a file
        return
    memory = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    size = int(quantity(memory)) // 2 if memory is not None else SHM_BYTES_DEFAULT
    volume = {"name": "ddpjob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
    volumes = [one for one in spec.get("volumes") or [] if one.get("name") != volume["name"]]
    spec["volumes"] = [*volumes, volume]
    trainer["volumeMounts"] = [*mounts, {"name": "ddpjob-shm", "mountPath": "/dev/shm"}]  # noqa: S108


def _spread(job: api.DDPJob, spec: Body) -> None:
    if not wants_one_pod_per_node(job.spec) or job.spec.pods == 1:
        return
    term = {"labelSelector": {"matchLabels": naming.labels(job)}, "topologyKey": "kubernetes.io/hostname"}
    affinity = spec.setdefault("affinity", {})
    wanted = affinity.setdefault("podAntiAffinity", {})
    name = "requiredDuringSchedulingIgnoredDuringExecution"
    wanted[name] = [*(wanted.get(name) or []), term]


def _stay_away(spec: Body, nodes: Sequence[str]) -> None:
    """Exclude nodes in every term of the node affinity, because the scheduler accepts a node that matches any term.
    Each requirement has one name, as the API demands."""
    if not nodes:
        return
    wanted = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    selector = wanted.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    terms = selector.get("nodeSelectorTerms") or [{}]
    selector["nodeSelectorTerms"] = [{**t, "matchFields": [*(t.get("matchFields") or []), *others]} for t in terms]


def _host_network(spec: Body, rendezvous: naming.Endpoint) -> None:
    if not spec.get("hostNetwork"):
        return
    spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    trainer = trainer_container({"spec": spec}) or {}
    # Declare the port, so that the scheduler never puts two jobs with the same port on one node.
    port = {"name": "ddpjob-master", "containerPort": rendezvous.port, "hostPort": rendezvous.port, "protocol": "TCP"}
    trainer["ports"] = [*(trainer.get("ports") or []), port]

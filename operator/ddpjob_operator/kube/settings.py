"""How the operator's process runs: environment variables, which the chart sets, as OperatorSettings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from ddpjob_operator.gangs import ADAPTERS
from ddpjob_operator.job import storage
from ddpjob_operator.kube.lease import Durations
from ddpjob_operator.plan.actions import Settings as PlanSettings

LOG_FORMATS = ("text", "json")
EVENTS = ("Brief", "All", "Warning")


@dataclasses.dataclass(frozen=True)
class OperatorSettings:
    """Under each field: its variable, its meaning and unit, its default and why."""

    namespaces: tuple[str, ...] = ()
    """DDPJOB_WATCH_NAMESPACES: the namespaces whose jobs are run, separated by commas. Empty, the default: all, which
    needs a ClusterRole; with a list Roles are enough."""
    health_port: int = 8080
    """DDPJOB_HEALTH_PORT: port of /healthz. 0: none. 8080, because it needs no privilege."""
    metrics_port: int = 0
    """DDPJOB_METRICS_PORT: port of /metrics. 0, the default: none, because every pod of the cluster can reach it."""
    metrics_of_jobs: bool = True
    """DDPJOB_METRICS_OF_JOBS: whether each job has series of its own, with its namespace and name. false: only sums,
    which name no job; jobs are still counted by namespace."""
    status_port: int = 0
    """DDPJOB_STATUS_PORT: port on which trainers' reports are received. 0, the default: none, because every pod of the
    cluster can reach it."""
    status_url: str = ""
    """DDPJOB_STATUS_URL: where trainers post their reports: the Service before `status_port`. Empty, the default: they
    do not report."""
    log_level: str = "INFO"
    """DDPJOB_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR. INFO says who leads, what is wrong, and a
    line for each decision about a job."""
    log_format: str = "text"
    """DDPJOB_LOG_FORMAT: text, for people, or json: an object a line, for a log store. `--log-format` overrides it."""
    events: str = "Brief"
    """DDPJOB_EVENTS: Brief, All, or Warning: only Events of that type. Brief, the default: of a job that starts within
    3 s, trains for less than ten minutes and completes, no Events that it runs and has completed, because its
    conditions say both, and where many such jobs are made, All costs each of them 14 requests and not 12."""
    rules: PlanSettings = dataclasses.field(default_factory=PlanSettings)
    """DDPJOB_LOST_NODE_SECONDS: a node that has been NotReady for so many seconds is lost. 30, because Kubernetes takes
    another 10 to 50 s to call it so, and a node that is back sooner has cost nothing.
    DDPJOB_KEEP_LOG_TAIL: whether the last lines of a failed rank's log go into its job's status, where whoever may see
    the job reads them. true, because they tell the cause; false leaves the exception alone."""
    keep_from_autoscalers: bool = True
    """DDPJOB_KEEP_FROM_AUTOSCALERS: whether pods carry the annotations that keep autoscalers from removing their nodes.
    true, because a node that is removed costs a training all steps since its last snapshot; false leaves it to the
    template."""
    mount_api_token: bool = True
    """DDPJOB_MOUNT_API_TOKEN: whether the pods of jobs mount the API token of their service account. true, as for all
    pods; false leaves it to the template."""
    gangs: tuple[str, ...] = ()
    """DDPJOB_GANGS: the APIs that spec.gang may use, separated by commas: native, kueue. Empty, the default: none, and
    nothing is asked of the API server for them."""
    queue_places: bool = False
    """DDPJOB_QUEUE_PLACES: whether the message of a job that waits in a queue names its place there, which is asked of
    the queue's own API once a minute. false, because that API needs a right of its own, and few clusters have it."""
    room: storage.StoredLimits = storage.DEFAULT
    """DDPJOB_MEMORY_MIB: how much memory it may use, in MiB. A quarter is for jobs that have begun, half of that for
    those of one namespace, and other jobs wait for a place in it. 512, because the chart sets that limit."""
    lease_namespace: str = ""
    """DDPJOB_LEASE_NAMESPACE: namespace of the Lease that decides which of several operators acts. Empty, the default:
    there is no Lease, and this operator always acts."""
    lease_name: str = "ddpjob-operator"
    """DDPJOB_LEASE_NAME: the same for all pods of a release."""
    lease: Durations = dataclasses.field(default_factory=Durations)
    """DDPJOB_LEASE_SECONDS, DDPJOB_LEASE_RENEW_SECONDS, DDPJOB_LEASE_RETRY_SECONDS: see Durations."""
    pod_name: str = ""
    """DDPJOB_POD_NAME: what the Lease calls its holder, and the pod that is labelled as the leader. Empty, the default:
    the name of the host, and no pod is labelled."""
    host_name: str = ""
    """HOSTNAME: what Events call the operator that has sent them."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> OperatorSettings:
        """From environment variables. Raises ValueError with the variable, its value and the fix."""
        names = [name.strip() for name in environment.get("DDPJOB_WATCH_NAMESPACES", "").split(",")]
        levels, must = ("DEBUG", "INFO", "WARNING", "ERROR"), "DEBUG, INFO, WARNING or ERROR"
        level = _checked(environment, "DDPJOB_LOG_LEVEL", "INFO", lambda text: text.upper() in levels, must).upper()
        must = "whole seconds from 1 to 86400"
        lost = _checked(environment, "DDPJOB_LOST_NODE_SECONDS", "30", partial(_is_number, first=1, last=86_400), must)
        return OperatorSettings(
            namespaces=tuple(dict.fromkeys(name for name in names if name)),
            health_port=_port(environment, "DDPJOB_HEALTH_PORT", "8080"),
            metrics_port=_port(environment, "DDPJOB_METRICS_PORT", "0"),
            metrics_of_jobs=_flag(environment, "DDPJOB_METRICS_OF_JOBS"),
            status_port=_port(environment, "DDPJOB_STATUS_PORT", "0"),
            status_url=environment.get("DDPJOB_STATUS_URL", ""),
            log_level=level,
            log_format=_checked(environment, "DDPJOB_LOG_FORMAT", "text", LOG_FORMATS.__contains__, "text or json"),
            events=_checked(environment, "DDPJOB_EVENTS", "Brief", EVENTS.__contains__, "Brief, All or Warning"),
            rules=PlanSettings(lost_node_seconds=int(lost), keep_log_tail=_flag(environment, "DDPJOB_KEEP_LOG_TAIL")),
            keep_from_autoscalers=_flag(environment, "DDPJOB_KEEP_FROM_AUTOSCALERS"),
            mount_api_token=_flag(environment, "DDPJOB_MOUNT_API_TOKEN"),
            gangs=_gangs(environment),
            queue_places=_flag(environment, "DDPJOB_QUEUE_PLACES", "false"),
            room=storage.StoredLimits.of(_memory_mib(environment) << 20),
            lease_namespace=environment.get("DDPJOB_LEASE_NAMESPACE", ""),
            lease_name=environment.get("DDPJOB_LEASE_NAME", "ddpjob-operator"),
            lease=_durations(environment),
            pod_name=environment.get("DDPJOB_POD_NAME", ""),
            host_name=environment.get("HOSTNAME", ""),
        )

    @property
    def watched(self) -> tuple[str, ...]:
        """The namespaces to list and watch; "" is all of them."""
        return self.namespaces or ("",)

    def summary(self) -> str:
        """What is watched, and which settings have another value than their default, for the log."""
        where = f"namespaces {', '.join(self.namespaces)}" if self.namespaces else "all namespaces"
        rules, lease = PlanSettings(), Durations()
        told = (
            ("DDPJOB_LOG_LEVEL", self.log_level, OperatorSettings.log_level),
            ("DDPJOB_LOG_FORMAT", self.log_format, OperatorSettings.log_format),
            ("DDPJOB_EVENTS", self.events, OperatorSettings.events),
            ("DDPJOB_METRICS_OF_JOBS", self.metrics_of_jobs, OperatorSettings.metrics_of_jobs),
            ("DDPJOB_LOST_NODE_SECONDS", self.rules.lost_node_seconds, rules.lost_node_seconds),
            ("DDPJOB_KEEP_LOG_TAIL", self.rules.keep_log_tail, rules.keep_log_tail),
            ("DDPJOB_KEEP_FROM_AUTOSCALERS", self.keep_from_autoscalers, True),
            ("DDPJOB_MOUNT_API_TOKEN", self.mount_api_token, True),
            ("DDPJOB_GANGS", ",".join(self.gangs), ""),
            ("DDPJOB_QUEUE_PLACES", self.queue_places, False),
            ("DDPJOB_MEMORY_MIB", self.room.memory >> 20, storage.DEFAULT.memory >> 20),
            ("DDPJOB_LEASE_SECONDS", self.lease.lease_seconds, lease.lease_seconds),
            ("DDPJOB_LEASE_RENEW_SECONDS", self.lease.renew_seconds, lease.renew_seconds),
            ("DDPJOB_LEASE_RETRY_SECONDS", self.lease.retry_seconds, lease.retry_seconds),
        )
        changed = ", ".join(f"{name}={_as_text(value)}" for name, value, default in told if value != default)
        lease_name = f"{self.lease_namespace}/{self.lease_name}" if self.lease_namespace else "none"
        return (
            f"watches {where}; Lease: {lease_name}; progress: {self.status_url or 'off'}; "
            f"metrics: {f'port {self.metrics_port}' if self.metrics_port else 'off'}; "
            f"settings other than the defaults: {changed or 'none'}"
        )


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _durations(environment: Mapping[str, str]) -> Durations:
    names = ("DDPJOB_LEASE_SECONDS", "DDPJOB_LEASE_RENEW_SECONDS", "DDPJOB_LEASE_RETRY_SECONDS")
    must = "seconds above 0 and below a day"
    lease, renew, retry = (
        float(_checked(environment, name, default, lambda text: 0 < _number(text) < 86_400, must))
        for name, default in zip(names, ("15", "10", "2"), strict=True)
    )
    if lease != int(lease):
        raise ValueError(f'DDPJOB_LEASE_SECONDS: must be whole seconds, is "{lease:g}"')
    if not 2 * retry < renew < lease:
        raise ValueError(
            f'DDPJOB_LEASE_RENEW_SECONDS: must be more than twice DDPJOB_LEASE_RETRY_SECONDS ("{retry:g}") and '
            f'less than DDPJOB_LEASE_SECONDS ("{lease:g}"), is "{renew:g}"'
        )
    return Durations(int(lease), renew, retry)


def _gangs(environment: Mapping[str, str]) -> tuple[str, ...]:
    def names(text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))

    must = f"names of {', '.join(ADAPTERS)}, separated by commas"
    return names(_checked(environment, "DDPJOB_GANGS", "", lambda text: set(names(text)) <= set(ADAPTERS), must))


def _is_number(text: str, first: int, last: int) -> bool:
    return text.isdecimal() and first <= int(text) <= last


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _memory_mib(environment: Mapping[str, str]) -> int:
    valid = partial(_is_number, first=64, last=1 << 24)
    return int(_checked(environment, "DDPJOB_MEMORY_MIB", "512", valid, "whole MiB from 64 on"))


def _port(environment: Mapping[str, str], name: str, default: str) -> int:
    valid = partial(_is_number, first=0, last=65_535)
    return int(_checked(environment, name, default, valid, "a port from 0 (off) to 65535"))


def _flag(environment: Mapping[str, str], name: str, default: str = "true") -> bool:
    either = ("true", "false")
    return _checked(environment, name, default, lambda text: text.lower() in either, "true or false").lower() == "true"


def _checked(environment: Mapping[str, str], name: str, default: str, valid: Callable[[str], bool], must: str) -> str:
    text = environment.get(name, default)
    if not valid(text):
        raise ValueError(f'{name}: must be {must}, is "{text}"')
    return text

"""Settings of the operator process: environment variables, which the chart sets, as OperatorSettings."""

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
    """Each field documents its variable, meaning, unit, default and reason. docs/environment.md shows them."""

    namespaces: tuple[str, ...] = ()
    """DDPJOB_WATCH_NAMESPACES: namespaces whose jobs the operator runs, separated by commas. Empty, the default: all
    namespaces, which needs a ClusterRole. A list needs only Roles."""
    health_port: int = 8080
    """DDPJOB_HEALTH_PORT: port of /healthz; 0 turns it off. Default 8080, which needs no privilege."""
    metrics_port: int = 0
    """DDPJOB_METRICS_PORT: port of /metrics. Default 0 (off), because every pod of the cluster can reach it."""
    metrics_of_jobs: bool = True
    """DDPJOB_METRICS_OF_JOBS: true, the default, gives each job series of its own, with its namespace and name. false
    gives only sums without job names. Jobs are counted by namespace in both cases."""
    status_port: int = 0
    """DDPJOB_STATUS_PORT: port that receives the reports of trainers. Default 0 (off), because every pod of the cluster
    can reach it."""
    status_url: str = ""
    """DDPJOB_STATUS_URL: URL to which trainers post their reports: the Service of DDPJOB_STATUS_PORT. Empty, the
    default: they do not report."""
    log_level: str = "INFO"
    """DDPJOB_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR. INFO, the default, logs the leader, problems, and one line per
    decision about a job."""
    log_format: str = "text"
    """DDPJOB_LOG_FORMAT: text for people, or json for a log store (one object a line). `--log-format` overrides it."""
    events: str = "Brief"
    """DDPJOB_EVENTS: Brief, All or Warning. Brief, the default, sends no Running and Completed Events for jobs that
    start within 3 s, train for less than 10 min and complete. Their conditions show both, and All costs such a job 14
    requests instead of 12. Warning sends only Events of that type."""
    rules: PlanSettings = dataclasses.field(default_factory=PlanSettings)
    """DDPJOB_LOST_NODE_SECONDS: a node counts as lost after it has been NotReady for this many seconds. Default 30:
    Kubernetes needs another 10 to 50 s to mark it NotReady, and a node that is back sooner costs nothing.
    DDPJOB_KEEP_LOG_TAIL: true, the default, copies the last log lines of a failed rank into the status of its job,
    because they show the cause. Everybody who may read the job can read them. false copies only the exception."""
    keep_from_autoscalers: bool = True
    """DDPJOB_KEEP_FROM_AUTOSCALERS: true, the default, gives pods the annotations that keep autoscalers from removing
    their nodes. Otherwise a removed node costs a job all steps after its last snapshot. false leaves it to the
    template."""
    mount_api_token: bool = True
    """DDPJOB_MOUNT_API_TOKEN: true, the default, mounts the API token of the service account in pods of jobs, as
    Kubernetes does for all pods. false leaves it to the template."""
    gangs: tuple[str, ...] = ()
    """DDPJOB_GANGS: APIs that spec.gang may use, separated by commas: native, kueue. Empty, the default: none, and the
    operator sends no requests for them."""
    queue_places: bool = False
    """DDPJOB_QUEUE_PLACES: true shows the position of a queued job in its message. It is read from the queue's API once
    a minute. Default false, because this needs another permission, and few clusters serve that API."""
    room: storage.StoredLimits = storage.DEFAULT
    """DDPJOB_MEMORY_MIB: memory that the operator may use, in MiB. A quarter of it is for jobs that have begun, half of
    that quarter for those of one namespace. New jobs wait until there is room. Default 512, the limit in the chart."""
    lease_namespace: str = ""
    """DDPJOB_LEASE_NAMESPACE: namespace of the Lease for leader election. Empty, the default: no leader election, and
    this operator always acts."""
    lease_name: str = "ddpjob-operator"
    """DDPJOB_LEASE_NAME: name of the Lease, the same for all pods of a release."""
    lease: Durations = dataclasses.field(default_factory=Durations)
    """DDPJOB_LEASE_SECONDS, DDPJOB_LEASE_RENEW_SECONDS, DDPJOB_LEASE_RETRY_SECONDS: see Durations."""
    pod_name: str = ""
    """DDPJOB_POD_NAME: name of this pod, which the Lease shows as holder and which gets the label of the leader. Empty,
    the default: the host name and a random suffix in the Lease, and no label."""
    host_name: str = ""
    """HOSTNAME: name of the sender in Events."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> OperatorSettings:
        """Return the settings in these variables. Raise ValueError with the variable, its value and the fix."""
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
        """Namespaces to list and watch; "" means all."""
        return self.namespaces or ("",)

    def summary(self) -> str:
        """Return a line for the log: what is watched, and the settings that differ from their defaults."""
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

"""Settings of the operator process: environment variables, which the chart sets, as OperatorSettings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from ddpjob_operator.gangs import ADAPTERS
from ddpjob_operator.job import storage
from ddpjob_operator.kube.lease import Durations
from ddpjob_operator.plan.actions import Settings as PlanSettings

T = TypeVar("T")


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

    changed: tuple[str, ...] = ()
    """The variables that differ from their defaults, for the log."""

    @staticmethod
    def read(environment: Mapping[str, str]) -> OperatorSettings:
        """Return the settings in these variables. Raise ValueError with the variable, its value and the fix."""
        changed: list[str] = []

        def read(name: str, default: T, parse: Callable[[str], T], must: str) -> T:
            value = _read(environment, name, default, parse, must)
            if value != default:
                changed.append(f"{name}={_as_text(value)}")
            return value

        def flag(name: str, default: bool = True) -> bool:
            return read(name, default, lambda text: _one_of("true", "false")(text.lower()) == "true", "true or false")

        def port(name: str, default: int) -> int:
            return _read(environment, name, default, _whole(0, 65_535), "a port from 0 (off) to 65535")

        names = (name.strip() for name in environment.get("DDPJOB_WATCH_NAMESPACES", "").split(","))
        usual, rules = OperatorSettings(), PlanSettings()
        levels, must = _one_of("DEBUG", "INFO", "WARNING", "ERROR"), "DEBUG, INFO, WARNING or ERROR"
        lost, adapters = "whole seconds from 1 to 86400", f"names of {', '.join(ADAPTERS)}, separated by commas"
        return OperatorSettings(
            namespaces=tuple(dict.fromkeys(name for name in names if name)),
            health_port=port("DDPJOB_HEALTH_PORT", usual.health_port),
            metrics_port=port("DDPJOB_METRICS_PORT", usual.metrics_port),
            status_port=port("DDPJOB_STATUS_PORT", usual.status_port),
            status_url=environment.get("DDPJOB_STATUS_URL", ""),
            log_level=read("DDPJOB_LOG_LEVEL", usual.log_level, lambda text: levels(text.upper()), must),
            log_format=read("DDPJOB_LOG_FORMAT", usual.log_format, _one_of("text", "json"), "text or json"),
            events=read("DDPJOB_EVENTS", usual.events, _one_of("Brief", "All", "Warning"), "Brief, All or Warning"),
            metrics_of_jobs=flag("DDPJOB_METRICS_OF_JOBS"),
            rules=PlanSettings(
                lost_node_seconds=read("DDPJOB_LOST_NODE_SECONDS", rules.lost_node_seconds, _whole(1, 86_400), lost),
                keep_log_tail=flag("DDPJOB_KEEP_LOG_TAIL"),
                answers_agents=bool(environment.get("DDPJOB_STATUS_URL")),
            ),
            keep_from_autoscalers=flag("DDPJOB_KEEP_FROM_AUTOSCALERS"),
            mount_api_token=flag("DDPJOB_MOUNT_API_TOKEN"),
            gangs=read("DDPJOB_GANGS", usual.gangs, _adapters, adapters),
            queue_places=flag("DDPJOB_QUEUE_PLACES", usual.queue_places),
            room=storage.StoredLimits.of(
                read("DDPJOB_MEMORY_MIB", usual.room.memory >> 20, _whole(64, 1 << 24), "whole MiB from 64 on") << 20
            ),
            lease_namespace=environment.get("DDPJOB_LEASE_NAMESPACE", ""),
            lease_name=environment.get("DDPJOB_LEASE_NAME", usual.lease_name),
            lease=_durations(read),
            pod_name=environment.get("DDPJOB_POD_NAME", ""),
            host_name=environment.get("HOSTNAME", ""),
            changed=tuple(changed),
        )

    @property
    def watched(self) -> tuple[str, ...]:
        """Namespaces to list and watch; "" means all."""
        return self.namespaces or ("",)

    def summary(self) -> str:
        """Return a line for the log: what is watched, and the settings that differ from their defaults."""
        where = f"namespaces {', '.join(self.namespaces)}" if self.namespaces else "all namespaces"
        lease_name = f"{self.lease_namespace}/{self.lease_name}" if self.lease_namespace else "none"
        return (
            f"watches {where}; Lease: {lease_name}; progress: {self.status_url or 'off'}; "
            f"metrics: {f'port {self.metrics_port}' if self.metrics_port else 'off'}; "
            f"settings other than the defaults: {', '.join(self.changed) or 'none'}"
        )


def _durations(read: Callable[[str, float, Callable[[str], float], str], float]) -> Durations:
    must, usual = "seconds above 0 and below a day", Durations()
    lease = read("DDPJOB_LEASE_SECONDS", usual.lease_seconds, _seconds, must)
    renew = read("DDPJOB_LEASE_RENEW_SECONDS", usual.renew_seconds, _seconds, must)
    retry = read("DDPJOB_LEASE_RETRY_SECONDS", usual.retry_seconds, _seconds, must)
    if lease != int(lease):
        raise ValueError(f'DDPJOB_LEASE_SECONDS: must be whole seconds, is "{lease:g}"')
    if not 2 * retry < renew < lease:
        raise ValueError(
            f'DDPJOB_LEASE_RENEW_SECONDS: must be more than twice DDPJOB_LEASE_RETRY_SECONDS ("{retry:g}") and '
            f'less than DDPJOB_LEASE_SECONDS ("{lease:g}"), is "{renew:g}"'
        )
    return Durations(int(lease), renew, retry)


def _read(environment: Mapping[str, str], name: str, default: T, parse: Callable[[str], T], must: str) -> T:
    """Return the value of a variable. parse: raises ValueError if invalid. must: the requirement, for the error."""
    text = environment.get(name)
    try:
        return default if text is None else parse(text)
    except ValueError:
        raise ValueError(f'{name}: must be {must}, is "{text}"') from None


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_of(*texts: str) -> Callable[[str], str]:
    return lambda text: texts[texts.index(text)]


def _whole(first: int, last: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not first <= int(text) <= last:
            raise ValueError
        return int(text)

    return parse


def _seconds(text: str) -> float:
    if not 0 < float(text) < 86_400:
        raise ValueError
    return float(text)


def _adapters(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not set(names) <= set(ADAPTERS):
        raise ValueError
    return names

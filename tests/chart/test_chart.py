"""The Helm chart as `helm template` renders it: what it requires of a cluster, and which mistakes it refuses."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.access import GANG_RIGHTS, PLACES_RIGHT, RIGHTS, Right
from ddpjob_operator.kube.leader_label import LABEL
from ddpjob_operator.kube.other_releases import MARK
from ddpjob_operator.kube.ports.receive import PATH
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.pods import naming

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "ddpjob-operator"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
Golden = Callable[[str, list[Any]], None]
OLDEST = "1.29.0"
# The operator has these rights only in its own namespace, and the rights to get and update only for one Lease.
# The operator's check at its start leaves these rights out: the task that renews the Lease logs a missing one.
LEASE_RIGHT = Right("coordination.k8s.io", "leases", ("get", "create", "update"), "to elect the operator that acts")
LABEL_RIGHT = Right("", "pods", ("patch",), "to label its own pod that leads")
MARKS_RIGHT = Right("", "configmaps", ("list",), "to see releases that watch one namespace alone")

pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH; install Helm 3 or 4")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60, env=environment)


def sets(*settings: str, by: str = "--set") -> list[str]:
    return [word for setting in settings for word in (by, setting)]


def rendered(*words: str, release: str = "ops", namespace: str = "ddpjob", version: str = OLDEST) -> list[Any]:
    """Return all objects of the chart, those of `helm test` too."""
    done = helm("template", release, str(CHART), "--namespace", namespace, "--kube-version", version, *words)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(*words: str, release: str = "ops", version: str = OLDEST) -> str:
    """Return the error that Helm shows."""
    done = helm("template", release, str(CHART), "--namespace", "ddpjob", "--kube-version", version, *words)
    assert done.returncode != 0
    return done.stderr


@functools.cache
def objects(*settings: str) -> list[dict[str, Any]]:
    """Return the objects that are applied with these values."""
    return rendered("--skip-tests", *sets(*settings))


def of_kind(kind: str, *settings: str) -> list[dict[str, Any]]:
    return [document for document in objects(*settings) if document["kind"] == kind]


def pod(*settings: str) -> dict[str, Any]:
    (deployment,) = of_kind("Deployment", *settings)
    return deployment["spec"]["template"]


def container(*settings: str) -> dict[str, Any]:
    (found,) = pod(*settings)["spec"]["containers"]
    return found


def variables(*settings: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(*settings)["env"] if "value" in entry}


def ports(*settings: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(*settings)["ports"]}


def verbs(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return every (group, resource, verb) that the rules allow."""
    assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in rules), "no names, no URLs"
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def job_roles(*settings: str) -> list[dict[str, Any]]:
    """Return the roles with the operator's rights on jobs, one for each namespace."""
    return [role for role in of_kind("Role", *settings) if not role["metadata"]["name"].endswith("-lease")]


def cluster_role(*settings: str) -> dict[str, Any]:
    """Return the role with the operator's rights on jobs in all namespaces."""
    names = ("ddpjob-edit", "ddpjob-view")
    roles = [role for role in of_kind("ClusterRole", *settings) if role["metadata"]["name"] not in names]
    (found,) = [role for role in roles if not role["metadata"]["name"].endswith("-marks")]
    return found


def granted_everywhere(*settings: str) -> set[tuple[str, str, str]]:
    """Return the (group, resource, verb) that the operator may use in all namespaces."""
    account = of_kind("ServiceAccount", *settings)[0]["metadata"]["name"]
    bound = {
        binding["roleRef"]["name"]
        for binding in of_kind("ClusterRoleBinding", *settings)
        if any(subject["name"] == account for subject in binding["subjects"])
    }
    roles = [r for r in of_kind("ClusterRole", *settings) if r["metadata"]["name"] in bound and "rules" in r]
    return {one for r in roles if not r["metadata"]["name"].endswith("-marks") for one in verbs(r["rules"])}


NEEDED = {(right.group, right.resource, verb) for right in RIGHTS for verb in right.verbs}
NEEDED_IN_A_NAMESPACE = {
    (right.group, right.resource, verb) for right in RIGHTS if not right.cluster_wide for verb in right.verbs
}
NAMESPACED = "watchNamespaces={team-a,team-b}"


def test_helm_lint_reports_nothing() -> None:
    done = helm("lint", "--strict", str(CHART), "--kube-version", OLDEST)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_has_exactly_the_rights_that_it_checks_at_its_start() -> None:
    role = cluster_role()
    assert verbs(role["rules"]) == NEEDED
    (binding,) = [b for b in of_kind("ClusterRoleBinding") if not b["metadata"]["name"].endswith("-marks")]
    (account,) = of_kind("ServiceAccount")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "ddpjob"}
    ]
    assert pod()["spec"]["serviceAccountName"] == account["metadata"]["name"]


@pytest.mark.parametrize("where", [(), (NAMESPACED,)], ids=["everywhere", "in namespaces"])
def test_an_enabled_gang_scheduler_gets_exactly_its_rights(where: tuple[str, ...]) -> None:
    """An enabled gang scheduler must give the operator exactly the rights on its objects; a disabled one none."""
    for name, rights in GANG_RIGHTS.items():
        on = (*where, f"gang.{name}.enabled=true")
        assert OperatorSettings.read(variables(*on)).gangs == (name,)
        more = {(r.group, r.resource, verb) for r in rights for verb in r.verbs if not r.cluster_wide}
        roles, before = job_roles(*on), job_roles(*where)
        for role, old in zip(roles, before, strict=True):
            assert verbs(role["rules"]) - verbs(old["rules"]) == more
        in_cluster = {(r.group, r.resource, verb) for r in rights for verb in r.verbs if r.cluster_wide}
        granted = granted_everywhere(*on) - granted_everywhere(*where)
        assert granted == (in_cluster if where else more | in_cluster)
    assert OperatorSettings.read(variables(*where)).gangs == ()


@pytest.mark.parametrize("where", [(), (NAMESPACED,)], ids=["everywhere", "in namespaces"])
def test_queue_positions_are_requested_only_if_the_chart_enables_them(where: tuple[str, ...]) -> None:
    """Without queue positions, the chart must grant no rights on Kueue's visibility API, which may be missing."""
    kueue = (*where, "gang.kueue.enabled=true")
    on = (*kueue, "gang.kueue.places.enabled=true")
    assert OperatorSettings.read(variables(*on)).queue_places
    one = {(PLACES_RIGHT.group, PLACES_RIGHT.resource, verb) for verb in PLACES_RIGHT.verbs}
    for role, old in zip(job_roles(*on), job_roles(*kueue), strict=True):
        assert verbs(role["rules"]) - verbs(old["rules"]) == one
    assert not OperatorSettings.read(variables(*kueue)).queue_places


def test_kueue_may_read_the_jobs_that_own_pods_if_the_chart_allows_it() -> None:
    """If the values allow it, Kueue must get the right to read DDPJobs: its webhook refuses their pods without it."""
    on = ("gang.kueue.enabled=true", "gang.kueue.readsJobs.enabled=true")
    account = {"kind": "ServiceAccount", "name": "kueue-controller-manager", "namespace": "kueue-system"}
    bindings = [b for b in of_kind("ClusterRoleBinding", *on) if b["subjects"] == [account]]
    roles = [
        r for r in of_kind("ClusterRole", *on) if r["metadata"]["name"] in {b["roleRef"]["name"] for b in bindings}
    ]
    assert [verbs(role["rules"]) for role in roles] == [{("training.ddpjob.io", "ddpjobs", "get")}]
    assert not any(account in b["subjects"] for b in of_kind("ClusterRoleBinding", on[0]))


def test_secrets_and_logs_are_never_readable_and_nodes_can_only_be_read() -> None:
    for role in [cluster_role(), *job_roles(NAMESPACED)]:
        resources = {resource for _, resource, _ in verbs(role["rules"])}
        assert resources.isdisjoint({"secrets", "pods/log", "pods/exec", "configmaps", "*"})
        assert {verb for _, resource, verb in verbs(role["rules"]) if resource == "nodes"} <= {"list", "watch"}


def test_with_a_list_of_namespaces_there_is_no_cluster_role() -> None:
    kinds = {document["kind"] for document in objects(NAMESPACED)}
    assert not any(kind.startswith("Cluster") for kind in kinds)
    roles = job_roles(NAMESPACED)
    bindings = of_kind("RoleBinding", NAMESPACED)
    bindings = [b for b in bindings if not b["metadata"]["name"].endswith("-lease")]
    for listed in (roles, bindings):
        assert [document["metadata"]["namespace"] for document in listed] == ["team-a", "team-b"]
    assert all(verbs(role["rules"]) == NEEDED_IN_A_NAMESPACE for role in roles)
    assert all(binding["subjects"][0]["namespace"] == "ddpjob" for binding in bindings)
    assert variables(NAMESPACED)["DDPJOB_WATCH_NAMESPACES"] == "team-a,team-b"


def test_users_who_may_edit_or_view_a_namespace_may_edit_or_view_its_jobs() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind("ClusterRole")}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    edit, view = roles["ddpjob-edit"], roles["ddpjob-view"]
    assert {label for label in edit["metadata"]["labels"] if label.startswith(prefix)} == {
        f"{prefix}edit",
        f"{prefix}admin",
    }
    assert {label for label in view["metadata"]["labels"] if label.startswith(prefix)} == {f"{prefix}view"}
    written = {"create", "update", "patch", "delete", "deletecollection"}
    assert {verb for _, resource, verb in verbs(edit["rules"]) if resource == api.PLURAL} >= written
    assert not {verb for _, _, verb in verbs(view["rules"])} & written


def test_only_the_operator_may_write_the_status_of_a_job() -> None:
    (edit,) = [role for role in of_kind("ClusterRole") if role["metadata"]["name"] == "ddpjob-edit"]
    assert {verb for _, resource, verb in verbs(edit["rules"]) if resource.endswith("/status")} == {"get"}


def test_the_roles_for_users_can_be_omitted() -> None:
    names = {role["metadata"]["name"] for role in of_kind("ClusterRole", "userRoles=false")}
    assert names == {"ops-ddpjob-operator", "ops-ddpjob-operator-marks"}


def test_the_pod_meets_the_restricted_pod_security_profile() -> None:
    spec, trainer = pod()["spec"], container()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert trainer["securityContext"]["allowPrivilegeEscalation"] is False
    assert trainer["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all(volume.keys() <= {"name", "emptyDir"} for volume in spec["volumes"])


def test_the_uid_of_the_operator_can_be_left_to_the_cluster() -> None:
    """The uid must be optional, because OpenShift's restricted-v2 refuses a uid outside the namespace's range."""
    left = ("podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null")
    pods = [d for d in rendered(*sets(*left)) if d["kind"] in ("Deployment", "Pod")]
    assert len(pods) == 2, "the operator, and the pod of `helm test`"
    for found in pods:
        spec = found["spec"]["template"]["spec"] if found["kind"] == "Deployment" else found["spec"]
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_root_filesystem_is_read_only_and_tmp_is_writable() -> None:
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    assert [mount["mountPath"] for mount in container()["volumeMounts"]] == ["/tmp"]


def test_one_operator_is_standby_and_new_ones_start_before_old_ones_stop() -> None:
    (deployment,) = of_kind("Deployment")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


def test_the_operators_are_spread_over_nodes_if_possible_and_never_refused_for_it() -> None:
    (spread,) = pod()["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()


def test_a_drain_takes_one_operator_at_a_time_and_is_never_blocked() -> None:
    (budget,) = of_kind("PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= pod()["metadata"]["labels"].items()
    assert of_kind("PodDisruptionBudget", "replicas=1") == []


@pytest.mark.parametrize("settings", [(), (NAMESPACED,)], ids=["all namespaces", "two namespaces"])
def test_the_operator_may_use_its_own_lease_and_no_other(settings: tuple[str, ...]) -> None:
    (lease,) = of_kind("Lease", *settings)
    (role,) = [role for role in of_kind("Role", *settings) if role["metadata"]["name"].endswith("-lease")]
    (binding,) = [b for b in of_kind("RoleBinding", *settings) if b["metadata"]["name"].endswith("-lease")]
    told = variables(*settings)
    place = {lease["metadata"]["namespace"], role["metadata"]["namespace"], binding["metadata"]["namespace"]}
    assert place == {told["DDPJOB_LEASE_NAMESPACE"]} == {"ddpjob"}
    assert told["DDPJOB_LEASE_NAME"] == lease["metadata"]["name"]
    named, unnamed, labels, tested = role["rules"]
    assert (labels["resources"], labels["verbs"]) == ([LABEL_RIGHT.resource], [*LABEL_RIGHT.verbs])
    assert (tested["resources"], tested["resourceNames"], tested["verbs"]) == (
        ["deployments"],
        [lease["metadata"]["name"]],
        ["get"],
    )
    assert (named["verbs"], named["resourceNames"]) == (["get", "update"], [lease["metadata"]["name"]])
    assert unnamed["verbs"] == ["create"], "Kubernetes cannot limit it to a name"
    assert set(named["verbs"] + unnamed["verbs"]) == set(LEASE_RIGHT.verbs)
    assert all(rule["apiGroups"] == [LEASE_RIGHT.group] for rule in (named, unnamed))
    assert all(rule["resources"] == [LEASE_RIGHT.resource] for rule in (named, unnamed))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


@pytest.mark.parametrize(
    ("settings", "name", "places"),
    [
        ((), f"all.{MARK}", ["kube-system"]),
        (("claimNamespace=ops",), f"all.{MARK}", ["ops"]),
        (("claimNamespace=null",), f"all.{MARK}", ["kube-system"]),  # as `--reuse-values` leaves it after an upgrade
        (("watchNamespaces=null",), f"all.{MARK}", ["kube-system"]),  # `watchNamespaces:` without a value
        ((NAMESPACED,), MARK, ["team-a", "team-b"]),
    ],
    ids=["all namespaces", "another place", "values of the chart before", "an empty list", "two namespaces"],
)
def test_each_release_marks_its_namespaces_with_the_same_names(settings, name, places):
    """Each release must mark its namespaces by a ConfigMap of a fixed name, so that Helm refuses a second release."""
    marks = of_kind("ConfigMap", *settings)
    assert [(mark["metadata"]["name"], mark["metadata"]["namespace"]) for mark in marks] == [(name, p) for p in places]
    assert all(mark["data"] == {"release": "ddpjob/ops"} for mark in marks)
    rules = [rule for role in of_kind("ClusterRole", *settings) for rule in role["rules"]]
    reads = [rule for rule in rules if rule["resources"] == [MARKS_RIGHT.resource]]
    assert [(rule["resourceNames"], rule["verbs"]) for rule in reads] == (
        [] if name == MARK else [([MARK], [*MARKS_RIGHT.verbs])]
    )


def test_the_lease_has_no_holder_so_that_an_upgrade_takes_it_from_nobody() -> None:
    (lease,) = of_kind("Lease")
    assert lease.keys() == {"apiVersion", "kind", "metadata"}


def test_the_operator_gets_its_name_and_its_memory_limit_from_its_pod() -> None:
    told = {entry["name"]: entry["valueFrom"] for entry in container()["env"] if "valueFrom" in entry}
    assert told == {
        "DDPJOB_POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "DDPJOB_MEMORY_MIB": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
    }


OTHERWISE = (
    *(NAMESPACED, "healthPort=9000", "progress.port=9001", "logLevel=DEBUG"),
    *("lostNodeSeconds=90", "keepLogTail=false", "keepFromAutoscalers=false", "mountApiToken=false", "events=Warning"),
)


@pytest.mark.parametrize("settings", [(), OTHERWISE], ids=["as it comes", "otherwise"])
def test_the_operator_accepts_the_settings_of_the_chart(settings: tuple[str, ...]) -> None:
    told = variables(*settings)
    read = OperatorSettings.read(told)
    assert ",".join(read.namespaces) == told["DDPJOB_WATCH_NAMESPACES"]
    assert read.health_port == ports(*settings)["health"]
    assert read.status_url == told["DDPJOB_STATUS_URL"]
    assert read.log_level == told["DDPJOB_LOG_LEVEL"]
    assert (read.lease_namespace, read.lease_name) == ("ddpjob", told["DDPJOB_LEASE_NAME"])
    wanted = (90, False) if settings else (VALUES["lostNodeSeconds"], VALUES["keepLogTail"])
    assert (read.rules.lost_node_seconds, read.rules.keep_log_tail) == wanted
    assert (read.keep_from_autoscalers, read.mount_api_token) == (not settings, not settings)
    assert read.events == ("Warning" if settings else "Brief")


def test_trainers_get_the_service_that_leads_to_the_receiver() -> None:
    settings = ("progress.port=9001",)
    (service,) = of_kind("Service", *settings)
    (port,) = service["spec"]["ports"]
    name, told = service["metadata"]["name"], variables(*settings)
    assert told["DDPJOB_STATUS_URL"] == f"http://{name}.ddpjob.svc:{port['port']}{PATH}"
    assert ports(*settings)[port["targetPort"]] == int(told["DDPJOB_STATUS_PORT"]) == 9001
    selector = service["spec"]["selector"]
    assert selector.pop(LABEL) == "true", "the pod that leads alone"
    assert selector.items() <= pod(*settings)["metadata"]["labels"].items()


def test_the_health_port_is_on_no_service_and_answers_every_probe() -> None:
    probes = [container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == [{"path": "/healthz", "port": "health"}] * 3
    assert [port["targetPort"] for service in of_kind("Service") for port in service["spec"]["ports"]] == ["status"]


def test_progress_reports_can_be_switched_off_completely() -> None:
    off = ("progress.enabled=false", "networkPolicy.enabled=true")
    assert of_kind("Service", *off) == []
    assert "status" not in ports(*off)
    assert (variables(*off)["DDPJOB_STATUS_PORT"], variables(*off)["DDPJOB_STATUS_URL"]) == ("0", "")
    assert of_kind("NetworkPolicy", *off)[0]["spec"]["ingress"] == []


def test_a_network_policy_lets_only_trainers_of_the_watched_namespaces_report() -> None:
    assert of_kind("NetworkPolicy") == []
    (policy,) = of_kind("NetworkPolicy", "networkPolicy.enabled=true", NAMESPACED)
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    ((rule,),) = [policy["spec"]["ingress"]]
    assert rule["ports"] == [{"port": "status"}]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchExpressions"] == [{"key": naming.LABEL_JOB, "operator": "Exists"}]
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    (everywhere,) = of_kind("NetworkPolicy", "networkPolicy.enabled=true")
    assert everywhere["spec"]["ingress"][0]["from"][0]["namespaceSelector"] == {}


def test_jobs_on_the_host_network_can_be_allowed_by_address() -> None:
    settings = ("networkPolicy.enabled=true", "networkPolicy.extraFrom[0].ipBlock.cidr=10.0.0.0/16")
    (policy,) = of_kind("NetworkPolicy", *settings)
    assert policy["spec"]["ingress"][0]["from"][-1] == {"ipBlock": {"cidr": "10.0.0.0/16"}}


def test_only_named_clients_can_read_metrics_through_a_network_policy() -> None:
    named = r"networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring"
    (policy,) = of_kind("NetworkPolicy", "networkPolicy.enabled=true", named)
    metrics, status = policy["spec"]["ingress"]
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert metrics == {"ports": [{"port": "metrics"}], "from": [peer]}
    assert status["ports"] == [{"port": "status"}]
    (alone,) = of_kind("NetworkPolicy", "networkPolicy.enabled=true", "progress.enabled=false", named)
    assert alone["spec"]["ingress"] == [metrics]


def test_no_object_for_prometheus_or_grafana_is_created_by_default() -> None:
    """By default no object for Prometheus or Grafana may be created: a cluster may have no kind ServiceMonitor."""
    kinds = {document["kind"] for document in objects()}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}
    assert [one["metadata"]["name"] for one in of_kind("ConfigMap")] == [f"all.{MARK}"]
    assert len(of_kind("Service")) == 1
    assert ports()["metrics"] == 8082
    assert "metrics" not in ports("metrics.enabled=false")
    assert variables("metrics.enabled=false")["DDPJOB_METRICS_PORT"] == "0"


def test_a_service_monitor_selects_the_metrics_port_of_every_operator_and_keeps_the_namespace_label() -> None:
    """A ServiceMonitor must have honorLabels, or all jobs would appear in the operator's namespace."""
    settings = (
        *("metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prometheus"),
        "metrics.serviceMonitor.interval=1m30s",  # several units, as in Prometheus
    )
    (monitor,) = of_kind("ServiceMonitor", *settings)
    status, metrics = sorted(of_kind("Service", *settings), key=lambda s: "-metrics" in s["metadata"]["name"])
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= metrics["metadata"]["labels"].items()
    assert not wanted.items() <= status["metadata"]["labels"].items(), "the receiver of reports has no metrics"
    assert metrics["spec"]["selector"].items() <= pod()["metadata"]["labels"].items()
    assert metrics["spec"]["clusterIP"] == "None", "a balanced address would ask one of the pods each time"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["honorLabels"], endpoint["interval"]) == ("metrics", True, "1m30s")
    assert metrics["spec"]["ports"][0]["targetPort"] in ports()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["ddpjob"]}


def test_the_rules_are_the_file_that_prometheus_can_load() -> None:
    settings = ("metrics.prometheusRule.enabled=true", "metrics.prometheusRule.labels.release=prometheus")
    (rule,) = of_kind("PrometheusRule", *settings)
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_the_dashboards_of_all_jobs_and_of_one_job_have_the_label_for_the_grafana_sidecar() -> None:
    _, *found = of_kind("ConfigMap", "metrics.dashboards.enabled=true")
    assert [c["metadata"]["labels"]["grafana_dashboard"] for c in found] == ["1", "1"]
    texts = {name: text for c in found for name, text in c["data"].items()}
    assert sorted(texts) == ["ddpjob-fleet.json", "ddpjob-job.json"]
    for name, text in texts.items():
        assert json.loads(text) == json.loads((CHART / "files" / "dashboards" / name).read_text())
        assert len(text) < 1 << 19, "a ConfigMap has at most a megabyte"


def notes(folder: Path, *arguments: str) -> str:
    """Return Helm's final notes. `helm template` leaves them out, so a copy of the chart renders them as a value."""
    copy = Path(shutil.copytree(CHART, folder / "ddpjob-operator", dirs_exist_ok=True))
    text = (copy / "templates" / "NOTES.txt").read_text()
    rendered = '{{ define "notes" }}' + text + '{{ end }}\nnotes: {{ include "notes" . | quote }}\n'
    (copy / "templates" / "notes.yaml").write_text(rendered)
    done = helm(
        "template", "ops", str(copy), "-n", "ddpjob", "--kube-version", OLDEST, "-s", "templates/notes.yaml", *arguments
    )
    assert done.returncode == 0, done.stderr
    said: str = yaml.safe_load(done.stdout)["notes"]
    return said


def test_the_notes_name_what_is_installed_and_what_to_do_next(tmp_path: Path) -> None:
    said = notes(tmp_path)
    (deployment,) = of_kind("Deployment")
    assert "watches all namespaces" in said
    assert f"kubectl -n ddpjob rollout status deployment/{deployment['metadata']['name']}" in said
    for example in re.findall(r"-f (\S+)", said):
        assert (ROOT / example).exists()
    assert "Progress is off" not in said
    assert "Helm does not upgrade CRDs" not in said


def test_the_notes_name_settings_that_differ_from_the_default(tmp_path: Path) -> None:
    said = notes(tmp_path, "--set", NAMESPACED, "--set", "progress.enabled=false", "--is-upgrade")
    assert "kubectl apply -n team-a -f" in said, "a job in another namespace is seen by nobody, and has no state"
    assert "kubectl get ddpjobs -n team-a --watch" in said
    assert "watches team-a, team-b" in said
    assert "STEP, PROGRESS and ETA columns stay empty" in said
    crds = re.search(r"Helm does not upgrade CRDs.*?--server-side --force-conflicts -f (\S+)", said, re.S)
    assert crds is not None, said
    assert list((ROOT / crds[1]).glob("*.yaml"))


def test_the_notes_warn_about_a_scraper_that_the_network_policy_blocks(tmp_path: Path) -> None:
    """The notes must warn about a scraper that the network policy blocks: the alert for a missing leader would fire."""
    on = ("--set", "networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true")
    named = ("--set", "networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus")
    assert "networkPolicy.metricsFrom" in notes(tmp_path, *on)
    assert "networkPolicy.metricsFrom" not in notes(tmp_path, *on, *named)


def test_the_image_has_the_chart_version_or_the_pinned_one() -> None:
    assert container()["image"] == f"ddpjob-operator:{chart()['appVersion']}"
    assert container("image.repository=r.example/op", "image.tag=v2")["image"] == "r.example/op:v2"
    digest = f"sha256:{'a' * 64}"
    assert container("image.repository=r.example/op", f"image.digest={digest}")["image"] == f"r.example/op@{digest}"


def test_the_chart_and_the_package_have_the_same_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert (chart()["version"], chart()["appVersion"]) == (version, version)


def test_every_object_has_the_labels_that_identify_it() -> None:
    for document in objects() + objects(NAMESPACED, "networkPolicy.enabled=true"):
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "ddpjob-operator"
        assert labels["app.kubernetes.io/instance"] == "ops"


def test_names_fit_into_a_dns_label_whatever_the_release_is_called() -> None:
    assert max(len(document["metadata"]["name"]) for document in rendered(release="r" * 53)) <= 63


def test_the_name_of_the_metrics_service_has_room_for_its_suffix() -> None:
    """A long release name must be cut before the suffix, because Kubernetes refuses names above 63 characters."""
    for release, settings in (("r" * 53, ()), ("ops", (f"fullnameOverride={'n' * 55}",))):
        found = rendered(*sets("metrics.serviceMonitor.enabled=true", *settings), release=release)
        names = [document["metadata"]["name"] for document in found if document["kind"] == "Service"]
        assert [len(name) <= 63 for name in names] == [True, True]


NAMED_LIKE_NUMBERS = (
    *("gang.kueue.readsJobs.serviceAccount=7", "gang.kueue.readsJobs.namespace=8"),
    *("serviceAccount.name=11", "priorityClassName=12", "fullnameOverride=ops"),
)
SWITCHED_ON = (
    *("networkPolicy.enabled=true", "metrics.serviceMonitor.enabled=true", "replicas=2"),
    *("gang.kueue.enabled=true", "gang.kueue.readsJobs.enabled=true"),
)


def names_in(value: Any, key: str = "") -> list[object]:
    """Return the values of all fields that contain names."""
    if isinstance(value, dict):
        return [found for name, one in value.items() for found in names_in(one, name)]
    if isinstance(value, list):
        return [found for one in value for found in names_in(one, key)]
    names = ("name", "namespace", "serviceAccountName", "priorityClassName", "value", "values", "matchNames")
    return [value] if key in (*names, "app.kubernetes.io/instance") else []


@pytest.mark.parametrize("watched", ["watchNamespaces={2024,0x1f}", "claimNamespace=1e3"])
def test_names_that_yaml_would_read_as_numbers_stay_names(watched: str) -> None:
    """A name such as 2024 or 1e3 must be quoted, because YAML reads it as a number."""
    words = sets(*SWITCHED_ON) + sets(*NAMED_LIKE_NUMBERS, watched, by="--set-string")
    found = names_in(rendered(*words, release="1e3", namespace="2024"))
    assert {"2024", "1e3", "7", "8", "11", "12"} <= set(found)
    assert [name for name in found if not isinstance(name, str)] == []


@pytest.mark.parametrize(
    ("release", "settings", "name"),
    [
        ("ddpjob-operator", (), "ddpjob-operator"),
        ("ops", (), "ops-ddpjob-operator"),
        ("my.release", (), "my-release-ddpjob-operator"),
        ("ops", ("nameOverride=training",), "ops-training"),
        ("9lives", ("fullnameOverride=training",), "training"),
    ],
)
def test_all_objects_have_one_name_that_can_be_set(release: str, settings: tuple[str, ...], name: str) -> None:
    documents = rendered(*sets(*settings), release=release)
    names = {document["metadata"]["name"] for document in documents} - {"ddpjob-edit", "ddpjob-view", f"all.{MARK}"}
    assert names == {name} | {f"{name}-{suffix}" for suffix in ("marks", "lease", "status", "test")}
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    told = {
        entry["name"]: entry.get("value") for entry in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert told["DDPJOB_LEASE_NAME"] == name
    assert f"//{name}-status." in told["DDPJOB_STATUS_URL"]


def test_a_name_that_is_invalid_for_a_service_is_refused_with_the_fix() -> None:
    assert "set fullnameOverride" in refusal(release="9lives")


def test_every_document_installs_the_same_release_name() -> None:
    """All pages must install the same release name, so that `helm upgrade` finds the release of another page."""
    pages = [ROOT / "README.md", CHART / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = re.findall(r"helm (?:install|upgrade|template|uninstall|test|status|get values) ([\w-]+)", text)
    assert len(named) > 5
    assert set(named) == {"ddpjob-operator"}


def test_values_from_before_a_setting_existed_give_the_same_objects() -> None:
    """`helm upgrade --reuse-values`, which lacks newer values, must give the same objects."""
    new = (
        "nameOverride",
        "fullnameOverride",
        "serviceAccount.create",
        "rbac",
        "podSecurityContext",
        "keepFromAutoscalers",
        "mountApiToken",
        "extraEnv",
        "claimNamespace",
        "metrics",
        "logFormat",
        "events",
        "gang",
    )
    policy = ("networkPolicy.enabled=true",)
    settings = [f"{name}=null" for name in (*new, "networkPolicy.metricsFrom")]
    assert objects(*settings, *policy) == objects(*policy)


def test_an_existing_service_account_gets_the_roles_and_is_not_created() -> None:
    """An existing service account must get the roles and not be created again, which Helm would refuse."""
    own = ("serviceAccount.create=false", "serviceAccount.name=training")
    assert of_kind("ServiceAccount", *own) == []
    assert pod(*own)["spec"]["serviceAccountName"] == "training"
    bindings = [*of_kind("ClusterRoleBinding", *own), *of_kind("RoleBinding", *own)]
    assert {subject["name"] for binding in bindings for subject in binding["subjects"]} == {"training"}


def test_the_roles_can_be_rendered_separately_for_an_administrator() -> None:
    """The roles must be separable, because an administrator of a namespace cannot grant rights that they lack."""
    roles = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    for settings in ((), ("watchNamespaces={a,b}",), ("watchNamespaces={a,b}", "gang.kueue.enabled=true")):
        with_them = objects(*settings, "userRoles=false")
        assert [o for o in with_them if o["kind"] not in roles] == objects(*settings, "rbac.create=false")
        files = ("rbac", "kueue") if "gang.kueue.enabled=true" in settings else ("rbac",)
        shown = sets(*(f"templates/{name}.yaml" for name in files), by="-s")
        separate = rendered(*sets(*settings, "userRoles=false"), *shown)
        assert {(o["kind"], o["metadata"]["name"]) for o in separate} == {
            (o["kind"], o["metadata"]["name"]) for o in with_them if o["kind"] in roles
        }


def test_additional_variables_reach_the_operator() -> None:
    """Additional variables in the values must reach the operator, because pages name some for the Lease."""
    own = ("extraEnv[0].name=DDPJOB_LEASE_SECONDS", "extraEnv[0].value=60.0", "extraEnv[1].name=A")
    assert container(*own)["env"][-2:] == [{"name": "DDPJOB_LEASE_SECONDS", "value": "60.0"}, {"name": "A"}]


def test_no_variable_of_the_chart_can_be_set_twice() -> None:
    for name in {entry["name"] for entry in container()["env"]}:
        assert f"extraEnv: {name} is set by the chart" in refusal(*sets(f"extraEnv[0].name={name}"))


def test_an_autoscaler_may_remove_a_node_with_an_operator_unless_the_values_forbid_it() -> None:
    """The values must let an autoscaler remove an operator's node, which it would keep because of the local /tmp."""
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert pod()["metadata"]["annotations"] == {key: "true"}
    escaped = key.replace(".", r"\.")
    assert pod(f"podAnnotations.{escaped}=never")["metadata"]["annotations"] == {key: "never"}


def hooks(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the objects that `helm test` creates, by kind."""
    shown = rendered("-s", "templates/tests/installation.yaml", *sets(*settings))
    return {document["kind"]: document for document in shown}


def test_the_pod_of_helm_test_is_its_only_hook_and_has_the_rights_of_the_operator() -> None:
    """`helm test` must create one hook, its pod, because `--logs` prints the log once per hook."""
    made = hooks()
    assert made.keys() == {"Pod"}
    assert made["Pod"]["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (test,) = made["Pod"]["spec"]["containers"]
    assert made["Pod"]["spec"]["serviceAccountName"] == pod()["spec"]["serviceAccountName"]
    told = {entry["name"]: entry["value"] for entry in test["env"]}
    same = ("DDPJOB_LEASE_NAMESPACE", "DDPJOB_LEASE_NAME", "DDPJOB_STATUS_URL")
    assert told == {key: variables()[key] for key in same}
    assert test["image"] == container()["image"]
    assert test["securityContext"]["allowPrivilegeEscalation"] is False
    assert importlib.util.find_spec(test["command"][-1]) is not None


def test_the_pod_of_helm_test_does_not_count_as_an_operator() -> None:
    labels = hooks()["Pod"]["metadata"]["labels"]
    (service,) = of_kind("Service")
    assert not service["spec"]["selector"].items() <= labels.items()


def test_the_pod_of_helm_test_has_the_resources_of_the_operator() -> None:
    """The pod of `helm test` must have the operator's resources, or a quota may refuse it."""
    (test,) = hooks("resources.limits.cpu=1")["Pod"]["spec"]["containers"]
    assert test["resources"] == container("resources.limits.cpu=1")["resources"]
    assert test["resources"]["limits"]["cpu"] == 1


@pytest.mark.parametrize("closed", ["progress.enabled=false", "networkPolicy.enabled=true"])
def test_helm_test_checks_no_reports_if_reports_are_switched_off(closed: str) -> None:
    (test,) = hooks(closed)["Pod"]["spec"]["containers"]
    assert "DDPJOB_STATUS_URL" not in {entry["name"] for entry in test["env"]}


def test_the_objects_of_a_release_match_the_golden_file(golden: Golden) -> None:
    """This golden file's diff shows what an upgrade changes in a cluster."""
    golden("as-it-comes.yaml", [*objects(), *hooks().values()])


def test_settings_that_a_cluster_requires_of_every_pod_can_be_made() -> None:
    """Settings that a cluster requires of every pod must be possible, such as a registry, tolerations and labels."""
    found = pod(
        *("priorityClassName=system-cluster-critical", "podLabels.team=infra", "podAnnotations.note=x"),
        *("nodeSelector.pool=system", "tolerations[0].operator=Exists", "imagePullSecrets[0].name=registry"),
    )
    assert found["metadata"]["labels"]["team"] == "infra"
    assert found["metadata"]["annotations"]["note"] == "x"
    wanted = {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
    }
    assert {name: found["spec"][name] for name in wanted} == wanted


@pytest.mark.parametrize("version", [f"1.{minor}.0" for minor in range(29, 38)])
def test_every_object_of_a_release_fits_the_schemas_of_kubernetes(version: str) -> None:
    """Every object must fit the schemas of each Kubernetes version: one unknown field fails the installation."""
    on = [f"{name}.enabled=true" for name in ("gang.native", "gang.kueue", "networkPolicy", "metrics.dashboards")]
    (crd,) = (yaml.safe_load(path.read_text()) for path in (CHART / "crds").glob("*.yaml"))
    if version == "1.29.0":  # 1.29 drops this field of a CRD; docs/versions.md shows how to apply it
        assert crd["spec"]["versions"][0].pop("selectableFields")
    for document in (crd, *rendered("--skip-tests", *sets(*on), version=version)):
        kubernetes_validate.validate(document, version, strict=True)


REFUSED = {
    "a misspelled value": ("watchNamespace={a}", "watchNamespace"),
    "a misspelled value inside another": ("image.repo=x", "repo"),
    "a namespace in capitals": ("watchNamespaces={Team}", "watchNamespaces"),
    "a namespace as text": ("watchNamespaces=team", "watchNamespaces"),
    "a namespace twice": ("watchNamespaces={a,a}", "watchNamespaces"),
    "a privileged port": ("progress.port=80", "port"),
    "a port as text": ("healthPort=http", "healthPort"),
    "a digest that is none": ("image.digest=latest", "digest"),
    "an address without a path": ("progress.url=http://gateway", "url"),
    "a log level that is none": ("logLevel=LOUD", "logLevel"),
    "events of a type that is none": ("events=Warnings", "events"),
    "a tag that YAML takes for a number": ("image.tag=2", "tag"),
    "no image": ("image.repository=", "repository"),
    "no operator": ("replicas=0", "replicas"),
    "a node that is lost at once": ("lostNodeSeconds=0", "lostNodeSeconds"),
    "a switch as text": ("keepLogTail=off", "keepLogTail"),
    "one port for two servers": ("healthPort=8081", "healthPort and progress.port: must differ"),
    "one port for health and metrics": ("metrics.port=8080", "healthPort and metrics.port: must differ, both are 8080"),
    "one port for reports and metrics": ("metrics.port=8081", "progress.port and metrics.port: must differ, both are"),
    "a monitor of metrics that are off": ("metrics.enabled=false,metrics.serviceMonitor.enabled=true", "needs metrics"),
    "an interval in words": ("metrics.serviceMonitor.interval=often", "interval"),
    "a dashboard in the singular": ("metrics.dashboard.enabled=true", "dashboard"),
    "metrics of jobs that may be": ("metrics.perJob=maybe", "perJob"),
    "a log format that is none": ("logFormat=yaml", "logFormat"),
    "a Lease in words": ("extraEnv[0].name=DDPJOB_LEASE_SECONDS,extraEnv[0].value=abc", 'a day, is "abc"'),
    "a renewal that takes no time": ("extraEnv[0].name=DDPJOB_LEASE_RENEW_SECONDS,extraEnv[0].value=0.0", 'is "0.0"'),
    "a retry after a day": (
        "extraEnv[0].name=DDPJOB_LEASE_RETRY_SECONDS,extraEnv[0].value=86400.0",
        'DDPJOB_LEASE_RETRY_SECONDS must be seconds above 0 and below a day, is "86400.0"',
    ),
    "an image with a space": ("image.repository=a b", "/image/repository"),
    "an image with its tag": ("image.repository=ddpjob-operator:1", "/image/repository"),
    "a tag with a slash": ("image.tag=a/b", "/image/tag"),
    "a quantity in words": ("resources.requests.cpu=lots", "/resources/requests/cpu"),
    "a quantity below nothing": ("resources.limits.memory=-1", "/resources/limits/memory"),
    "an account that nobody has named": ("serviceAccount.create=false", "serviceAccount.name: must be set"),
    "an account with a capital": ("serviceAccount.name=Training", "/serviceAccount/name"),
    "a name with a dot": ("fullnameOverride=a.b", "/fullnameOverride"),
    "a variable that is a number": ("extraEnv[0].name=A,extraEnv[0].value=5", "/extraEnv/0/value"),
    "a variable twice": ("extraEnv[0].name=A,extraEnv[1].name=A", "extraEnv: A is given twice"),
    "a label that finds the pods": (
        r"podLabels.app\.kubernetes\.io/name=x",
        "app.kubernetes.io/name belongs to the chart",
    ),
    "a label of a job's pods": (r"podLabels.training\.ddpjob\.io/job=x", "training.ddpjob.io/job belongs to"),
    "a label with a space": ("podLabels.team=a b", "/podLabels/team"),
    "a toleration with a typo": ("tolerations[0].efect=NoSchedule", "efect"),
    "an affinity with a typo": ("affinity.node=x", "node"),
    "a class with a capital": ("priorityClassName=High", "/priorityClassName"),
    "a pull secret in capitals": ("imagePullSecrets[0].name=A_B", "/imagePullSecrets/0/name"),
    "a peer of no kind": ("networkPolicy.extraFrom[0].cidr=10.0.0.0/8", "/networkPolicy/extraFrom/0"),
    "a uid in words": ("podSecurityContext.runAsUser=root", "/podSecurityContext/runAsUser"),
    "a security context with a typo": ("podSecurityContext.runAsUsr=1", "runAsUsr"),
    "places of a queue that is off": ("gang.kueue.places.enabled=true", "needs gang.kueue.enabled"),
    "an account of a queue that is off": ("gang.kueue.readsJobs.enabled=true", "needs gang.kueue.enabled"),
    "alerts on metrics that are off": (
        "metrics.enabled=false,metrics.prometheusRule.enabled=true",
        "metrics.prometheusRule.enabled: needs metrics.enabled",
    ),
    "dashboards of metrics that are off": (
        "metrics.enabled=false,metrics.dashboards.enabled=true",
        "metrics.dashboards.enabled: needs metrics.enabled",
    ),
    "a section taken away": ("progress=null", "progress"),
    "a value taken away": ("logLevel=null", "logLevel"),
}


@pytest.mark.parametrize(("setting", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_value_is_refused_and_named(setting: str, named: str) -> None:
    """A wrong value must be refused: with it, pods would restart repeatedly, and only their logs show why."""
    assert named in refusal(*sets(setting))


def test_a_kubernetes_version_that_is_too_old_is_refused_and_a_managed_one_is_not() -> None:
    assert "1.29" in refusal(version="1.28.9")
    assert rendered(version="1.29.4-gke.100")


def test_the_values_schema_and_the_values_file_have_the_same_settings() -> None:
    def same(values: Any, schema: dict[str, Any], where: str) -> None:
        known = schema.get("properties")
        if known and where not in (
            "resources",
            "affinity",
            "podSecurityContext",
        ):  # fields of Kubernetes itself, which the values leave empty
            assert values.keys() == known.keys() - {"global"}, where
            for name, value in values.items():
                same(value, known[name], name)

    same(VALUES, SCHEMA, "values")


def test_every_value_is_explained_in_the_values_file() -> None:
    ours = (CHART / "values.yaml").read_text().split("# Below:")[0].splitlines()
    settings = [n for n, line in enumerate(ours) if re.match(r"^ *[a-zA-Z]+: *\S|^[a-zA-Z]+:", line)]
    open_ones = [ours[n] for n in settings if n == 0 or not ours[n - 1].lstrip().startswith("#")]
    # Each setting below these headings has its own comment, so the headings need none.
    headings = {
        "image:",
        "serviceAccount:",
        "rbac:",
        "progress:",
        "metrics:",
        "networkPolicy:",
        "gang:",
        "  native:",
        "  kueue:",
        "    places:",
    }
    obvious = {
        "  pullPolicy: IfNotPresent",
        "  annotations: {}",
        "    cpu: 100m",
        "    memory: 128Mi",
        "    memory: 512Mi",
    }
    assert set(open_ones) <= headings | obvious


def test_the_documents_list_every_right_with_its_reason() -> None:
    table = (ROOT / "docs" / "security.md").read_text()
    gangs = (right for rights in GANG_RIGHTS.values() for right in rights)
    for right in (*RIGHTS, *gangs, PLACES_RIGHT, LEASE_RIGHT, MARKS_RIGHT, LABEL_RIGHT):
        row = f"| `{right}` | {', '.join(right.verbs)} | {right.why} |"
        assert row in table, f"docs/security.md wants the row\n{row}"


def chart() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return read

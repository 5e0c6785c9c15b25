"""The objects that the operator creates for a job: their fields, one by one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from worlds import UID, job

from ddpjob_operator.pods import build, report_token


def pod(what: Any = None, attempt: int = 1, rank: int = 0, avoid: tuple[str, ...] = ()) -> dict[str, Any]:
    return build.pod(what or job(), attempt, rank, avoid=avoid)


def trainer(body: dict[str, Any]) -> dict[str, Any]:
    return body["spec"]["containers"][0]


def with_pod(**fields: Any) -> Any:
    what = job()
    what.spec.template["spec"].update(fields)
    return what


def test_the_objects_of_a_two_node_job_are_complete(golden: Callable[[str, list[Any]], None]) -> None:
    golden("digits-2-nodes.yaml", [build.service(job()), pod(rank=0), pod(rank=1)])


ELASTIC = {"minNodes": 1, "container": {"command": ["torchrun", "train.py"]}}
C10D = {"container": {"command": ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=$(MASTER_ADDR):29400", "t.py"]}}
DNS = {
    "only node 0, whose name all need": ({}, False),
    "all, on request": ({"dns": "all"}, True),
    "all of an elastic job, where torchrun chooses the master": (ELASTIC, True),
    "all where the command asks for such a rendezvous": (C10D, True),
    "not all of an elastic job, on request": ({**ELASTIC, "dns": "leader"}, False),
    "only node 0 under ddprun, elastic or not": ({"minNodes": 1, "container": {"command": ["ddprun", "t.py"]}}, False),
}


@pytest.mark.parametrize(("spec", "all_nodes"), DNS.values(), ids=DNS)
def test_the_service_selects_only_pods_whose_dns_name_is_needed(spec: dict[str, Any], all_nodes: bool) -> None:
    """A pod without a DNS name must not be selected: each selected pod costs the control plane writes of EndpointSlices
    whenever it changes."""
    leader = {} if all_nodes else {"training.ddpjob.io/rank": "0"}
    assert build.service(job(**spec))["spec"]["selector"] == {"training.ddpjob.io/job": "digits"} | leader
    what = job(**spec)
    replaced = build.pod(what, 3, 0, replacement=2)["metadata"]["labels"]
    assert leader.items() <= replaced.items(), "a leader that was replaced keeps the name"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        pytest.param({"restartPolicy": "Always"}, {"restartPolicy": "Never"}, id="the kubelet restarts no trainer"),
        # With a grace period of 0 the API server removes the pod object while the container is still running.
        ({"terminationGracePeriodSeconds": 0}, {"terminationGracePeriodSeconds": 1}),
        ({}, {"enableServiceLinks": False}),
        ({"enableServiceLinks": True}, {"enableServiceLinks": True}),
    ],
    ids=str,
)
def test_fields_of_a_pod_that_could_break_a_training_are_set(given: dict[str, Any], found: dict[str, Any]) -> None:
    assert pod(with_pod(**given))["spec"].items() >= found.items()


def test_the_pod_name_contains_the_attempt_and_the_dns_name_stays() -> None:
    body = pod(attempt=3, rank=1)
    assert body["metadata"]["name"] == "digits-3-1"
    assert (body["spec"]["hostname"], body["spec"]["subdomain"]) == ("digits-1", "digits")


def test_the_job_owns_all_objects_so_that_deletion_needs_no_finalizer() -> None:
    for body in (build.service(job()), pod()):
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (UID, True)
        assert "blockOwnerDeletion" not in owner


def test_a_restart_policy_of_the_trainer_container_cannot_restart_it_next_to_a_new_attempt() -> None:
    """A container's restartPolicy, which Kubernetes 1.34 accepts, must be overridden. Otherwise a restarted rank would
    write the same checkpoint as the next attempt."""
    rules = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]
    other = {"name": "proxy", "image": "p", "restartPolicy": "Always", "restartPolicyRules": rules}
    what = job(container={"restartPolicy": "Always", "restartPolicyRules": [{"action": "Restart"}]})
    what.spec.template["spec"].update(initContainers=[other])
    body = pod(what)
    assert {"restartPolicy", "restartPolicyRules"}.isdisjoint(trainer(body))
    (sidecar,) = body["spec"]["initContainers"]
    assert (sidecar["restartPolicy"], "restartPolicyRules" in sidecar) == ("Always", False), "a sidecar stays one"


def test_shared_memory_is_half_of_the_memory_limit_and_2_gib_without_one() -> None:
    def size(container: dict[str, Any] | None) -> str:
        return pod(job(container=container))["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]

    assert size({"resources": {"limits": {"memory": "16Gi"}}}) == str(8 * 2**30)
    assert size(None) == str(2 * 2**30)


def test_the_shared_memory_of_the_user_is_left_alone() -> None:
    what = job(container={"volumeMounts": [{"name": "mine", "mountPath": "/dev/shm/"}]})
    assert "volumes" not in pod(what)["spec"]


def test_the_end_of_the_log_is_kept_as_the_termination_message_unless_the_user_chose() -> None:
    assert trainer(pod())["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert trainer(pod(job(container={"terminationMessagePolicy": "File"})))["terminationMessagePolicy"] == "File"


def test_autoscalers_must_not_move_a_training_unless_the_user_allows_it() -> None:
    annotations = pod()["metadata"]["annotations"]
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    what = job()
    what.spec.template["metadata"] = {"annotations": {"karpenter.sh/do-not-disrupt": "false"}}
    assert pod(what)["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "false"
    # An administrator may let the autoscaler move jobs that are short and cheap to other nodes.
    given = build.pod(what, 1, 0, keep_from_autoscalers=False)["metadata"]["annotations"]
    assert given == {"karpenter.sh/do-not-disrupt": "false"}
    assert build.pod(job(), 1, 0, keep_from_autoscalers=False)["metadata"]["annotations"] == {}


def test_no_pod_gets_an_api_token_if_tokens_are_switched_off_unless_its_template_requests_one() -> None:
    """No pod may get an API token unless its template requests one: a job's code could use it in the cluster."""
    what = job()
    assert "automountServiceAccountToken" not in build.pod(what, 1, 0)["spec"], "as for all pods"
    assert build.pod(what, 1, 0, mount_api_token=False)["spec"]["automountServiceAccountToken"] is False
    what.spec.template["spec"]["automountServiceAccountToken"] = True
    assert build.pod(what, 1, 0, mount_api_token=False)["spec"]["automountServiceAccountToken"] is True
    reporting = build.Reporting("http://here/v1/progress")
    volumes = build.pod(job(), 1, 0, reporting=reporting, mount_api_token=False)["spec"]["volumes"]
    mounted = [volume["name"] for volume in volumes if "projected" in volume]
    assert mounted == [report_token.NAME], "the token for reports is independent of the service account's"


def test_gpu_jobs_get_one_pod_per_node_in_addition_to_the_affinity_of_the_user() -> None:
    own = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}}
    what = job(container={"resources": {"limits": {"nvidia.com/gpu": 1}}})
    what.spec.template["spec"]["affinity"] = own
    terms = pod(what)["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [t["topologyKey"] for t in terms] == ["rack", "kubernetes.io/hostname"]
    assert "affinity" not in pod(job())["spec"], "CPU jobs may share a node"
    assert "affinity" in pod(job(onePodPerNode=True))["spec"]


@pytest.mark.parametrize("affinity", [None, {"podAntiAffinity": None, "nodeAffinity": None}])
def test_a_null_field_equals_an_unset_field(affinity: Any) -> None:
    """A field with the value null, as Helm charts write it (`affinity:`), must count as unset."""
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    what, plain = job(container={**gpu, "terminationMessagePolicy": None, "env": None}), job(container=gpu)
    unset = {"affinity": affinity, "enableServiceLinks": None, "dnsPolicy": None, "initContainers": None}
    what.spec.template["spec"].update(unset, hostNetwork=True)
    plain.spec.template["spec"].update(hostNetwork=True)
    assert pod(what, avoid=("node-1",)) == pod(plain, avoid=("node-1",))


def test_on_the_host_network_the_port_is_declared_so_that_the_scheduler_prevents_clashes() -> None:
    body = pod(with_pod(hostNetwork=True))
    env = {e["name"]: e["value"] for e in trainer(body)["env"]}
    (port,) = trainer(body)["ports"]
    assert body["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert str(port["hostPort"]) == str(port["containerPort"]) == env["PET_MASTER_PORT"]


def test_the_container_named_trainer_is_the_trainer_at_any_position() -> None:
    what = job()
    what.spec.template["spec"]["containers"].insert(0, {"name": "sidecar", "image": "s"})
    sidecar, main = pod(what)["spec"]["containers"]
    assert "env" not in sidecar
    assert main["env"]


def test_variables_of_the_user_can_refer_to_those_of_the_job() -> None:
    """The job's variables must come before the user's, because $(NNODES) can only refer to an earlier variable."""
    what = job(container={"env": [{"name": "WORLD_SIZE", "value": "$(NNODES)"}]})
    names = [e["name"] for e in trainer(pod(what))["env"]]
    assert names.index("NNODES") < names.index("WORLD_SIZE")
    assert names.count("WORLD_SIZE") == 1


def test_building_a_pod_does_not_change_the_template_of_the_user() -> None:
    what = job(container={"volumeMounts": [], "env": [{"name": "A", "value": "b"}]})
    before = copy.deepcopy(what.spec.template)
    pod(what)
    assert what.spec.template == before


def test_labels_of_the_user_are_kept_and_cannot_hide_those_of_the_job() -> None:
    what = job()
    what.spec.template["metadata"] = {"labels": {"team": "vision", "training.ddpjob.io/job": "other"}}
    labels = pod(what, attempt=2, rank=1)["metadata"]["labels"]
    assert labels == {
        "team": "vision",
        "training.ddpjob.io/job": "digits",
        "training.ddpjob.io/attempt": "2",
        "training.ddpjob.io/rank": "1",
    }


def test_trainers_get_a_report_address_only_if_someone_listens() -> None:
    names = {e["name"] for e in trainer(pod())["env"]}
    assert "DDPJOB_STATUS_URL" not in names
    listening = build.pod(job(), 1, 0, reporting=build.Reporting("http://s/v1/progress", "/var/run/t"))
    env = {e["name"]: e["value"] for e in trainer(listening)["env"]}
    assert env["DDPJOB_STATUS_URL"] == "http://s/v1/progress"
    assert "DDPJOB_STATUS_INTERVAL" not in env, "the library's own interval; each variable costs CPU in every pod"


SIDECAR = {"name": "sidecar", "image": "x", "env": [{"name": "A", "value": "b"}]}
OWN_ENV = [{"name": "A", "value": "b"}, {"name": "NNODES", "value": "2"}, {"name": "C"}]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            'unknown field "spec.containers[{t}].env[{2}].valeu"',
            'unknown field "spec.template.spec.containers[{t}].env[2].valeu"',
        ),
        (
            "spec.containers[{t}].env[{0}].name: Required value",
            "spec.template.spec.containers[{t}].env[0].name: Required value",
        ),
        (
            "spec.containers[{s}].env[0].name: Required value",
            "spec.template.spec.containers[{s}].env[0].name: Required value",
        ),
        ("spec.containers[{t}].image: Required value", "spec.template.spec.containers[{t}].image: Required value"),
        ('unknown field "spec.tolerations[0].kee"', 'unknown field "spec.template.spec.tolerations[0].kee"'),
        ("see status.spec.x and the spec.", "see status.spec.x and the spec."),
        ("exceeded quota: pods, used: 1", "exceeded quota: pods, used: 1"),
    ],
)
@pytest.mark.parametrize("trainer_first", [True, False])
def test_errors_of_the_server_about_a_pod_refer_to_the_positions_in_the_template(said, shown, trainer_first):
    """An error must name the position in the user's template. The pod's env has more entries, such as `env[32]`."""
    what = job(container={"env": OWN_ENV})
    listed = what.spec.template["spec"]["containers"]
    listed.insert(1 if trainer_first else 0, SIDECAR)
    t, s = (0, 1) if trainer_first else (1, 0)
    body = build.pod(what, 1, 0)
    places = [entry["name"] for entry in body["spec"]["containers"][t]["env"]]
    at = [places.index(entry["name"]) for entry in OWN_ENV]
    assert at[0] > 10
    assert build.in_users_words(said.format(*at, t=t, s=s), body, what) == shown.format(t=t, s=s)


def test_the_log_of_an_init_container_is_kept_as_its_message_unless_the_template_says_otherwise() -> None:
    """The end of an init container's log must become its message: it shows why the job did not start."""
    own = {"name": "own", "image": "x", "terminationMessagePolicy": "File"}
    body = pod(with_pod(initContainers=[{"name": "init", "image": "x"}, own]))
    policies = [c["terminationMessagePolicy"] for c in body["spec"]["initContainers"]]
    assert policies == ["FallbackToLogsOnError", "File"]

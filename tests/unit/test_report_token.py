"""A pod gets a token with which its trainer reports. The user's own settings have precedence."""

from typing import Any

from ddpjob_operator.pods import report_token
from ddpjob_operator.pods.report_token import MOUNT, TOKEN_FILE, add_token

URL = "http://ddpjob-status.ddpjob.svc:8081/v1/progress"


def pod(**trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    container = {"name": "trainer", **trainer}
    spec: dict[str, Any] = {"containers": [{"name": "sidecar"}, container]}
    return spec, container


def test_only_the_trainer_gets_a_kubelet_token_for_our_audience_at_the_path_in_the_variable() -> None:
    spec, trainer = pod()
    add_token(spec, trainer)
    (volume,) = spec["volumes"]
    assert volume["projected"]["sources"] == [
        {"serviceAccountToken": {"audience": "training.ddpjob.io", "expirationSeconds": 3600, "path": "token"}}
    ]
    assert trainer["volumeMounts"] == [{"name": "ddpjob-token", "mountPath": MOUNT, "readOnly": True}]
    assert "volumeMounts" not in spec["containers"][0]
    assert report_token.environment(URL)["DDPJOB_STATUS_TOKEN_FILE"] == TOKEN_FILE == f"{MOUNT}/token"


def test_volumes_and_mounts_of_the_user_are_kept() -> None:
    spec, trainer = pod(volumeMounts=[{"name": "data", "mountPath": "/data"}])
    spec["volumes"] = [{"name": "data", "emptyDir": {}}]
    add_token(spec, trainer)
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "ddpjob-token"]
    assert [mount["name"] for mount in trainer["volumeMounts"]] == ["data", "ddpjob-token"]


def test_a_mount_of_the_user_at_that_path_wins() -> None:
    spec, trainer = pod(volumeMounts=[{"name": "mine", "mountPath": f"{MOUNT}/"}])
    add_token(spec, trainer)
    assert "volumes" not in spec
    spec, trainer = pod()
    spec["volumes"] = [{"name": "ddpjob-token", "emptyDir": {}}]
    add_token(spec, trainer)
    assert "volumeMounts" not in trainer


def test_the_hugging_face_trainer_gets_the_same_address_and_token_without_a_ca_file() -> None:
    variables = report_token.environment(URL)
    assert variables["KUBEFLOW_TRAINER_SERVER_URL"] == variables["DDPJOB_STATUS_URL"] == URL
    assert variables["KUBEFLOW_TRAINER_SERVER_TOKEN"] == variables["DDPJOB_STATUS_TOKEN_FILE"]
    assert "KUBEFLOW_TRAINER_SERVER_CA_CERT" not in variables

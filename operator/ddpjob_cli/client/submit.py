"""`ddpjob submit`: create a job and its code. If one of the two fails, neither stays."""

from __future__ import annotations

import contextlib

from ddpjob_cli.client import code, jobs
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError, ExistsError, NoAnswerError, NotFoundError
from ddpjob_cli.client.pack import Archive
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import api

JSON_PATCH = "application/json-patch+json"
_TRIES = 5


def submit(cluster: Cluster, document: Raw, archive: Archive | None) -> jobs.Stored:
    """Create a job and the ConfigMap with its code, which the job owns. Both are sent as a dry run first, so that a
    refusal leaves nothing behind. Raise InputError, ClusterError."""
    name = document["metadata"]["name"]
    body = code.into(document, archive) if archive else document
    try:
        cluster.create(jobs.path_of(cluster), body, dryRun="All")
    except ExistsError:
        raise InputError(_is_there(cluster, name)) from None
    if archive:
        with contextlib.suppress(ExistsError):
            cluster.create(_config_maps(cluster), code.config_map(archive), dryRun="All")
    try:
        made = jobs.of_raw(cluster.create(jobs.path_of(cluster), body))
    except NoAnswerError as error:
        look = f"check with `ddpjob get {name}`, and delete the job before you submit it again"
        raise ClusterError(f"{error}. It is unknown if {name} was created: {look}") from None
    if archive:
        try:
            _give(cluster, code.config_map(archive), made.raw)
        except BaseException:
            _remove(cluster, name)
            raise
    return made


def as_new(document: Raw) -> None:
    """Remove fields that belong to an existing object, because the API server refuses them in a new job."""
    document.pop("status", None)
    metadata = document["metadata"]
    of_object = ("ownerReferences", "finalizers") if "uid" in metadata else ()
    for field in (*api.SET_BY_THE_SERVER, *of_object):
        metadata.pop(field, None)


def objects(document: Raw, archive: Archive | None) -> list[Raw]:
    """Return the objects that `submit` would create, as documents for `kubectl apply --server-side`."""
    return [code.config_map(archive), code.into(document, archive)] if archive else [document]


def _give(cluster: Cluster, wanted: Raw, owner: Raw) -> None:
    """Create the ConfigMap, or make the job an owner of an existing one. Retry if another client deletes that one."""
    name, reference = wanted["metadata"]["name"], code.reference(owner)
    owned = {**wanted, "metadata": {**wanted["metadata"], "ownerReferences": [reference]}}
    for _ in range(_TRIES):
        try:
            cluster.create(_config_maps(cluster), owned)
            return
        except ExistsError:
            pass
        try:
            there = cluster.get(f"{_config_maps(cluster)}/{name}")
            if there.get("binaryData") != wanted["binaryData"] or not there["metadata"].get("ownerReferences"):
                raise ClusterError(f"ConfigMap {name} exists with other code: delete it")
            add = {"op": "add", "path": "/metadata/ownerReferences/-", "value": reference}
            cluster.patch(f"{_config_maps(cluster)}/{name}", [add], JSON_PATCH)
            return
        except NotFoundError:
            pass
    raise ClusterError(f"ConfigMap {name} is created and deleted repeatedly; try again")


def _remove(cluster: Cluster, name: str) -> None:
    """Delete a job whose code could not be stored, because its pods would wait forever."""
    try:
        cluster.delete(jobs.path_of(cluster, name))
    except ClusterError as error:
        raise ClusterError(f"{name} needs code that could not be stored, and could not be deleted: {error}") from None


def _is_there(cluster: Cluster, name: str) -> str:
    state = ""
    with contextlib.suppress(ClusterError, InputError):
        state = f" ({jobs.find(cluster, name).job.status.state or 'new'})"
    return (
        f"a DDPJob {name} already exists in namespace {cluster.namespace}{state}: "
        f"give this one another name (--name {name}-2), or delete the other (ddpjob delete {name})"
    )


def _config_maps(cluster: Cluster) -> str:
    return f"/api/v1/namespaces/{cluster.namespace}/configmaps"

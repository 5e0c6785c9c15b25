"""A queue of Kueue for the jobs of a test's namespace, and its state."""

from collections.abc import Mapping
from typing import Any

from clusters import Namespace, job, until

GPUS = 8
TAINT = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
SPOT = {"nodeLabels": {"pool": "spot"}, "tolerations": [TAINT]}


class Queue:
    """A queue for the namespace. By default it has eight GPUs, on nodes with a label and a taint."""

    def __init__(self, namespace: Namespace, group: str) -> None:
        self.namespace, self.group = namespace, group
        self.workloads = f"{group}/namespaces/{namespace.name}/workloads"
        self.version = group.removeprefix("/apis/")

    def make(self, flavor: Mapping[str, Any] = SPOT, resource: str = "nvidia.com/gpu", amount: int = GPUS) -> None:
        name = self.namespace.name
        quota = [{"name": resource, "nominalQuota": amount}]
        covered = {"coveredResources": [resource], "flavors": [{"name": name, "resources": quota}]}
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [covered],
        }
        self.create("resourceflavors", "ResourceFlavor", flavor)
        self.create("clusterqueues", "ClusterQueue", spec)
        for queue in ("main", "default"):
            path = f"{self.group}/namespaces/{name}/localqueues"
            body = {"apiVersion": self.version, "kind": "LocalQueue", "metadata": {"name": queue}}
            self.namespace.api.call("POST", path, {**body, "spec": {"clusterQueue": name}})
        for rank, value in (("low", 100), ("high", 1000)):
            body = {"apiVersion": self.version, "kind": "WorkloadPriorityClass", "value": value}
            body["metadata"] = {"name": f"{name}-{rank}"}
            self.namespace.api.call("POST", f"{self.group}/workloadpriorityclasses", body)

    def create(self, plural: str, kind: str, spec: Mapping[str, Any]) -> None:
        """Create a cluster-scoped object with the name of the namespace."""
        body = {"apiVersion": self.version, "kind": kind, "metadata": {"name": self.namespace.name}, "spec": spec}
        self.namespace.api.call("POST", f"{self.group}/{plural}", body)

    def remove(self) -> None:
        name = self.namespace.name
        self.namespace.kubectl("delete", "ddp", "--all", "--wait=false", check=False)
        kinds = [f"{kind}.kueue.x-k8s.io/{name}" for kind in ("clusterqueue", "resourceflavor", "topology")]
        kinds += [f"workloadpriorityclass/{name}-{rank}" for rank in ("low", "high")]
        self.namespace.kubectl("delete", "--wait=false", "--ignore-not-found", *kinds, check=False)

    def submit(
        self,
        name: str = "digits",
        gpus: int = 2,
        priority: str = "",
        queue: str = "main",
        launcher: str = "torchrun",
        **spec: Any,
    ) -> None:
        """Submit a job of two nodes with this many GPUs each."""
        container = {"command": [launcher, "train.py"], "resources": {"limits": {"nvidia.com/gpu": gpus}}}
        body = job(name, container=container, **spec)
        body["metadata"]["labels"] = {QUEUE_LABEL: queue} if queue else {}
        if priority:
            body["metadata"]["labels"][PRIORITY_LABEL] = f"{self.namespace.name}-{priority}"
        self.namespace.apply(body)

    def runs(self, name: str = "digits", attempt: int = 1, nodes: int = 2) -> None:
        pods = [f"{name}-{attempt}-{place}" for place in range(nodes)]
        self.namespace.has_pods(*pods)
        self.namespace.runs(*pods)
        self.namespace.reaches("Running", name=name)

    def workload(self, name: str = "digits") -> dict[str, Any]:
        return self.namespace.api.find(f"{self.workloads}/{name}") or {}

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.namespace.api.call("GET", self.workloads)["items"]
        return found

    def has(self, kind: str, status: str = "True", name: str = "digits") -> str:
        """Wait until a Workload has this condition; return its reason."""

        def there() -> dict[str, Any] | None:
            found = (self.workload(name).get("status") or {}).get("conditions") or ()
            return next((c for c in found if (c["type"], c["status"]) == (kind, status)), None)

        return str(until(there, f"the Workload of {name} is {kind}={status}")["reason"])

    def used(self) -> int:
        """Return the number of GPUs that the queue has given to jobs."""
        found = self.namespace.api.call("GET", f"{self.group}/clusterqueues/{self.namespace.name}")
        flavors = (found.get("status") or {}).get("flavorsReservation") or ()
        return sum(int(r["total"]) for flavor in flavors for r in flavor["resources"])

    def counts(self, gpus: int) -> None:
        """Wait until the queue counts this many GPUs, because Kueue updates its counts a moment later."""
        until(lambda: self.used() == gpus, f"the queue counts {gpus} GPUs")

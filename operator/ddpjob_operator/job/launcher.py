"""The launcher's options in the trainer's command, and contradictions between them and the job. With a contradiction
the launcher waits for nodes that never come (docs/dev/upstream.md), so the job is refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec.structs import replace

from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.launch import command, exit_codes, programs
from ddpjob_operator.job.launch.command import SCRIPT_READ_MAX, Command

Found = Iterator[tuple[tuple[str | int, ...], str]]

# Hosts that cannot be the rendezvous of several nodes: names that mean each node itself, and IPs.
# The IP of a pod is unknown before the pod runs.
NO_RENDEZVOUS_HOST = re.compile(
    r"^(localhost|\$\{?HOSTNAME\}?|\$\(hostname\)?|\d+\.\d+\.\d+\.\d+|\[?[0-9a-fA-F:]*::[0-9a-fA-F:]*\]?)$"
)
# Expansions whose result differs by node. Part of the host's name may be equal on all nodes: ${HOSTNAME%-*}.
_OTHER_ON_EACH_NODE = re.compile(
    r"\$(RANDOM|HOSTNAME|\$)(?!\w)|\$\{(RANDOM|HOSTNAME|\$)\}|(\$\(|`)(date|uuidgen|hostname(?=[^)`|]*[)`]))\b"
)
_OF_ONE_NODE = re.compile(
    # A regular expression without backtracking: tenants write the text, and the operator's event loop reads it.
    r"(?:^|[;&|(\n][ \t]*|\b(?:exec|env|run)[ \t]+)(?:[^\s;&|(]*/)?(deepspeed|horovodrun|mpiexec|mpirun|orterun)\s"
)
_OTHER_NODES = re.compile(r"host|machinefile|NODE_RANK|node_rank|MASTER_ADDR|\s-(?:H|f)\b")
# Open MPI's OMPI_MCA_orte_default_hostfile and PRTE_MCA_prte_default_hostfile, Intel MPI's I_MPI_HYDRA_HOST_FILE.
_HOSTFILE_VARIABLE = re.compile(r"host_?file", re.IGNORECASE)
# The paths where DeepSpeed looks for its hostfile if no option names it.
_HOSTFILE_MOUNTS = {"deepspeed": {"/job", "/job/hostfile"}}
NEEDS_LAUNCHER = (
    "this command cannot train with a changing number of nodes. Start the script with ddprun or torchrun, or remove "
    "minNodes."
)
# Arguments with which a script may form its group without variables.
_OWN_GROUP = re.compile(r"rank|world|dist|init|master", re.IGNORECASE)
# Options that torchrun takes from PET_ variables, and that decide which nodes it waits for.
_OF_ENVIRONMENT = ("nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint")
# Names that scripts use for the init_method option.
_INIT_METHOD_OPTION = re.compile(r"^--(?:dist|init)[-_](?:url|method)(?:=|$)")

_REFERENCE = (
    r"\$(?:\(\(\s*(?:\$\{?)?|[({])?"  # $NAME, ${NAME}, Kubernetes' $(NAME), a shell's $((NAME)) and $(($NAME - 1))
)
# Kubeflow's WORLD_SIZE and RANK count pods. In a DDPJob a launcher's options need NNODES and NODE_RANK instead.
_OF_PODS = (
    (re.compile(rf"((?:--nnodes[=\s]+|\bNNODES=)[\"']?{_REFERENCE})WORLD_SIZE\b"), "WORLD_SIZE", "NNODES"),
    (re.compile(rf"((?:--node[-_]rank[=\s]+|\bNODE_RANK=)[\"']?{_REFERENCE})RANK\b"), "RANK", "NODE_RANK"),
)


def warnings(spec: api.Spec) -> list[str]:
    """Return a warning for each launcher or option that is allowed but has a drawback."""
    launcher, notes = spec.facts.launcher, apart(spec)
    if launcher is not None and launcher.launcher == "ddprun":  # ddprun supports all of these options
        return notes
    options = launcher.options if launcher else {}
    if spec.preflight == "Always":
        notes.append("preflight: Always needs ddprun, or ddpjob.preflight.run() in the script")
    if spec.facts.min_nodes is not None:
        return [*notes, *_elastic_notes(options, spec)]
    if options.get("max_restarts", "0") != "0":
        notes.append(f"--max-restarts={options['max_restarts']}: torchrun's own restart hangs when a node is lost")
    if options.get("rdzv_backend", "static") != "static":
        notes.append(
            f"--rdzv-backend={options['rdzv_backend']} assigns ranks to nodes as they arrive, so any may get rank 0"
        )
    return notes


def apart(spec: api.Spec) -> list[str]:
    """Return why the command makes each node train alone, or starts nothing: a success would be suspicious."""
    alone = [] if spec.facts.launcher else _alone(spec)
    return [*dict.fromkeys((*alone, *_without_variables(spec), *_only_read(spec)))]


def _without_variables(spec: api.Spec) -> Iterator[str]:
    """Yield a warning if a program such as `sudo` withholds the job's variables from the launcher or the script."""
    nproc = spec.facts.gpus if spec.nproc_per_node == "auto" else spec.nproc_per_node
    for one in exit_codes.launcher_exits(spec.facts.command):
        taken, what = one.withheld, one.launcher
        if one.launcher == "python":
            what = one.started.script or "python"
            apart = taken.is_all and spec.nodes > 1 and not _OWN_GROUP.search(" ".join(one.started.words))
        else:
            apart = spec.nodes > 1 and taken.needed(one.started.options, nodes=True)
        if apart or (what != "python" and nproc > 1 and taken.needed(one.started.options, nodes=False)):
            means = f"each of the {spec.nodes} nodes trains alone, or waits for the others forever"
            means = means if apart else f"it starts one process and not {nproc}"
            yield f"`{taken.by}` withholds the job's variables from {what}, so {means}; {taken.fix}"


def waits_in_vain(spec: api.Spec, running: Iterable[tuple[int, list[str], Mapping[str, str]]]) -> Iterator[str]:
    """Yield why launchers wait for nodes that never come. running: node rank, words and variables of each process.

    A script in the image, or a program around the launcher, may give it other options and variables than the job's.
    """
    nodes_of: dict[str, set[int]] = {}
    for node, words, environ in running if spec.facts.min_nodes is None else ():
        started = None if command.is_shell(words) else command.by_torchrun(words)
        if started is None:
            continue
        given = {name: value for name in _OF_ENVIRONMENT if (value := environ.get(f"PET_{name.upper()}")) is not None}
        options = {"nnodes": "1", "node_rank": "0", **given, **started.options}
        rank = options.pop("node_rank")
        is_one = options["nnodes"] in ("1", "1:1") or (started.launcher == "ddprun" and "standalone" in options)
        if is_one and ("standalone" in options or rank == "0"):
            continue  # this process trains alone, perhaps on purpose, such as to prepare data
        nodes = nodes_of.setdefault(rank, set())
        nodes.add(node)
        own = replace(started, options=options)
        found = next(iter((*_nodes(own, spec), *_several_nodes(own, spec))), "")
        if found and "nnodes" not in {**given, **started.options}:
            found = "does not have the variable PET_NNODES"
        elif not found and len(nodes) > 1 and options.get("rdzv_backend", "static") == "static":
            found = f"has --node_rank={rank}, as on node {min(nodes)}"
        if found:
            yield f"node {node} waits for others in vain: {started.launcher} {found}"


def _only_read(spec: api.Spec) -> Iterator[str]:
    """Yield a warning about a shell, or a launcher, that runs nothing."""
    words = spec.facts.command
    for word, following in pairwise([] if command.is_shell(words) else words):
        if command.starts_ranks(word) and programs.tells_of_itself([following]):
            yield f"`{programs.name(word)} {following}` starts nothing; give it the script"
    place = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), len(words))
    if {"n", "noexec"} & command.shell_call(words[place:])[0]:
        yield f"{programs.name(words[place])} -n only checks the syntax of its script and runs nothing; leave -n out"


def _alone(spec: api.Spec) -> list[str]:
    """Yield a warning about a launcher that starts only its node's ranks, because nothing names the other nodes."""
    text = (spec.facts.shell_script or spec.facts.text)[:SCRIPT_READ_MAX]
    found = _OF_ONE_NODE.search(text)
    if spec.nodes == 1 or found is None or _OTHER_NODES.search(text):
        return []
    # No warning if the template mounts a hostfile or names one in a variable: it may list the other nodes.
    mounted = _HOSTFILE_MOUNTS.get(found[1], set()).intersection(spec.facts.mounts)
    if mounted or any(map(_HOSTFILE_VARIABLE.search, spec.facts.env)):
        return []
    return [
        f"{found[1]} starts ranks on its own node, so each of the {spec.nodes} nodes trains alone; start the script "
        "with torchrun"
    ]


def of_ranks(spec: api.Spec) -> Iterator[tuple[str, str]]:
    """Yield (WORLD_SIZE, NNODES) or (RANK, NODE_RANK) if an option of the launcher uses the first variable and means
    the second. The launcher sets the first variable only later, for its ranks."""
    own, text = spec.facts.env, spec.facts.text
    for pattern, name, meant in _OF_PODS if spec.facts.launcher else ():
        is_set = name in own or re.search(rf"\b{name}=", text)
        # ${WORLD_SIZE:-1} always has a value, and the 1 may be correct, so it is not reported.
        if not is_set and re.search(rf"{pattern.pattern}(?!:?[-=+])", text):
            yield name, meant


def contradictions(spec: api.Spec) -> Found:
    """Yield the path and a sentence with the fix for each contradiction. The template must be well-formed."""
    path = spec.facts.command_path
    yield from ((path, sentence) for sentence in _rendezvous_file(spec))
    launcher = spec.facts.launcher
    if spec.spares and not spec.facts.restarts_in_place:
        yield (
            ("spec", "spares"),
            "needs ddprun, which goes on without a lost node. Use it, or remove spares.",
        )
    if launcher is None:
        if spec.min_nodes is not None:
            yield ("spec", "minNodes"), NEEDS_LAUNCHER
        return
    for sentence in (*_nodes(launcher, spec), *_several_nodes(launcher, spec), *_processes(launcher, spec)):
        yield path, f"{launcher.launcher} {sentence}"


def _nodes(launcher: Command, spec: api.Spec) -> Iterator[str]:
    wanted = launcher.options.get("nnodes", "")
    least, most = launcher.nodes
    if wanted and spec.min_nodes is not None and least != spec.min_nodes:
        yield f"--nnodes={wanted} contradicts spec.minNodes: {spec.min_nodes}. Remove --nnodes: the job sets it."
    elif wanted and spec.spares:
        yield f"--nnodes={wanted} contradicts spec.spares: {spec.spares}. Remove --nnodes: the job sets it."
    elif least >= 0 and not (least == spec.nodes if least == most else 0 < least <= spec.nodes <= most):
        yield f"--nnodes={wanted} contradicts spec.nodes: {spec.nodes}. Remove --nnodes: the job sets it."
    backend = launcher.options.get("rdzv_backend", "c10d")
    if spec.facts.min_nodes is not None and backend != "c10d" and not spec.facts.restarts_in_place:
        yield f"--rdzv_backend={backend}: the nodes of an elastic job use the backend c10d. Remove it: the job sets it."
    rank = launcher.options.get("node_rank", "")
    if spec.nodes == 1 and bounds.count(rank) > 0:
        yield f"--node_rank={rank} waits for node 0, but spec.nodes: 1 is only this node. Remove it: the job sets it."


def _elastic_notes(options: dict[str, str], spec: api.Spec) -> Iterator[str]:
    most = bounds.count(options.get("nnodes", "").rpartition(":")[2])
    if most > spec.nodes:
        yield (
            f"--nnodes={options['nnodes']} allows more nodes than spec.nodes: {spec.nodes}, so each start waits 30 s "
            "(torchrun's last call) for nodes that do not come"
        )
    if bounds.count(options.get("max_restarts", "0")) > spec.backoff_limit:
        yield (
            f"--max-restarts={options['max_restarts']} is more than backoffLimit: {spec.backoff_limit}, and torchrun "
            "counts its restarts itself"
        )


def _several_nodes(launcher: Command, spec: api.Spec) -> Iterator[str]:
    is_elastic = spec.facts.min_nodes is not None
    if spec.nodes == 1 and not is_elastic:
        return
    options = launcher.options
    if "standalone" in options:
        yield f"--standalone is for one node, and spec.nodes is {spec.nodes}: each node would train alone. Remove it."
    if options.get("node_rank", "").isdecimal():
        rank = options["node_rank"]
        yield f"--node_rank={rank} gives all {spec.nodes} nodes the same rank. Remove it, or use $(NODE_RANK)."
    backend = options.get("rdzv_backend", "static")
    has_endpoint = is_elastic or options.get("rdzv_endpoint") or "PET_RDZV_ENDPOINT" in spec.facts.env
    if backend != "static" and not has_endpoint:
        yield (
            f"--rdzv_backend={backend} without --rdzv_endpoint: each of {spec.nodes} nodes waits at its own address. "
            "Add --rdzv_endpoint=$(MASTER_ADDR):$(MASTER_PORT)."
        )
    run_id = options.get("rdzv_id", "")
    if spec.facts.shell_script is not None and _OTHER_ON_EACH_NODE.search(run_id):
        yield f"--rdzv_id={run_id} differs on each of {spec.nodes} nodes. Remove it: the job sets it."
    for name in ("master_addr", "rdzv_endpoint"):
        host, port = _host_and_port(options.get(name, ""), options.get("master_port", "") if "addr" in name else "")
        if NO_RENDEZVOUS_HOST.match(host):
            fix = "Remove it: the job sets it." if "addr" in name else "Use $(MASTER_ADDR):$(MASTER_PORT)."
            yield f"--{name}={options[name]} is not an address at which {spec.nodes} nodes can find rank 0. {fix}"
        elif port == "0":
            yield f"port 0 is a different port on each of {spec.nodes} nodes, so they cannot meet. Use $(MASTER_PORT)."


def _host_and_port(endpoint: str, port: str) -> tuple[str, str]:
    host, _, own = endpoint.rpartition(":") if re.search(r":\d+$", endpoint) else (endpoint, "", "")
    return host, own or port


def _processes(launcher: Command, spec: api.Spec) -> Iterator[str]:
    wanted = launcher.options.get("nproc_per_node", "")
    if isinstance(spec.nproc_per_node, int) and wanted.isdecimal() and bounds.count(wanted) != spec.nproc_per_node:
        yield (
            f"--nproc_per_node={wanted} contradicts spec.nprocPerNode: {spec.nproc_per_node}. "
            "Remove one of them: the job sets the option."
        )
    if wanted == "gpu" and not spec.facts.gpus:
        yield "--nproc_per_node=gpu: the trainer's limits have no GPU. Remove it: the job sets the option."
    if launcher.launcher.endswith("launch") and "no_python" in launcher.options and "use_env" not in launcher.options:
        yield "--no_python cannot pass --local-rank. Add --use_env, or use torchrun."


def _rendezvous_file(spec: api.Spec) -> Iterator[str]:
    """Yield an init_method file:// in a folder that the nodes do not share."""
    for word, following in pairwise([*spec.facts.started.words, ""]):
        named = _INIT_METHOD_OPTION.match(word)
        value = (word.partition("=")[2] or following) if named else ""
        path = value.removeprefix("file://")
        if spec.nodes > 1 and path.startswith("/") and path != value and not _may_be_shared(path, spec):
            yield (
                f"{word.partition('=')[0]}={value}: {spec.nodes} nodes share no folder there, so the rendezvous never "
                "completes. Mount a volume that all nodes share (a ReadWriteMany claim), or use env://."
            )


def _may_be_shared(path: str, spec: api.Spec) -> bool:
    above = {mount: shared for mount, shared in spec.facts.mounts.items() if path.startswith(f"{mount}/")}
    return bool(above) and above[max(above, key=len)]

"""The rule about variables of Slurm and MPI, which are unset in a DDPJob."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator

from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, command_line, rule
from ddpjob_check.script import Script
from ddpjob_check.starting import runs_always

# By variable of Slurm or MPI: the corresponding variables of a DDPJob, in a rank and in a pod with one process.
COUNTERPARTS = {
    "SLURM_PROCID": "RANK", "SLURM_NTASKS": "WORLD_SIZE", "SLURM_NPROCS": "WORLD_SIZE", "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NODEID": "NODE_RANK", "SLURM_NNODES": "NNODES", "SLURM_JOB_NUM_NODES": "NNODES",
    "OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_NODE_RANK": "LOCAL_RANK",
}  # fmt: skip


@rule("error", wrong='rank = int(os.environ["SLURM_PROCID"])', right='rank = int(os.environ["RANK"])')
def variable_of_other_launcher(script: Script, job: CheckedJob) -> Iterator[Found]:
    """srun and mpirun set SLURM_PROCID and OMPI_COMM_WORLD_RANK. In a DDPJob nothing sets them: os.environ[…] raises a
    KeyError at the start, int(os.getenv(…)) a TypeError. The job's own values can be passed under these names
    ([launching.md](launching.md#with-a-launcher))."""
    if job.variables is None or not (job.by_torchrun or job.launcher in ("ddprun", "python")):
        return
    own = {name for name, _, _ in script.variables_set}
    missing = [name for name in COUNTERPARTS if name not in job.variables | own and _is_only_read(script, name)]
    reads = [node for node in script.nodes if isinstance(node, ast.expr) and script.variable_read(node) in missing]
    for node in sorted(reads, key=lambda node: (node.lineno, node.col_offset)):
        is_item = isinstance(node, ast.Subscript)
        if (is_item or _is_number(script, node)) and runs_always(script, node):
            name = script.variable_read(node)
            yield at(
                node,
                f"{script.text_of(node)}: nothing sets it here, so this is a {'KeyError' if is_item else 'TypeError'}. "
                "Two fixes: with the script unchanged: "
                f'{_recipe(script, job)}; or in the script: os.environ["{COUNTERPARTS[name]}"]',
            )
            return


def _is_only_read(script: Script, name: str) -> bool:
    """True if the script only reads this variable. A script that also tests if it is set may work without it."""
    reads = sum(script.variable_read(n) == name for n in script.nodes)
    return reads == sum(isinstance(n, ast.Constant) and n.value == name for n in script.nodes)


def _is_number(script: Script, node: ast.AST) -> bool:
    """True for int(os.getenv("SLURM_PROCID")), which has no default."""
    outer = script.parent(node)
    has_default = not isinstance(node, ast.Call) or len(node.args) > 1 or bool(node.keywords)
    return not has_default and isinstance(outer, ast.Call) and script.called(outer) == "int" and node in outer.args


def _recipe(script: Script, job: CheckedJob) -> str:
    """Return the YAML that passes the job's values under these names. Under a launcher a shell in each rank must do it,
    because the ranks' variables do not exist in the pod."""
    read = {script.variable_read(node) for node in script.nodes}
    names = [name for name in COUNTERPARTS if name in read]
    if job.launcher == "python" and job.nproc == 1 and not job.is_elastic:
        return f"env: [{', '.join(f'{{name: {name}, value: $({COUNTERPARTS[name]})}}' for name in names)}]"
    given = " ".join(f"{name}=${COUNTERPARTS[name]}" for name in names)
    line = f"{given} exec python {shlex.join((*job.script, *job.words))}"
    launcher = "ddprun" if job.launcher == "ddprun" else "torchrun"
    return command_line([launcher, "--no-python", "sh", "-c", line])

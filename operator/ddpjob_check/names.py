"""Names of other nodes, which have no DNS record unless spec.dns says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpjob_check.ranks import at
from ddpjob_check.rule import Found, Job, rule
from ddpjob_check.script import Script

_NUMBER = r"(?:[1-9]\d*|\{\w*\}|%[ds]|\$\{?\w+\}?|\$\(\w+\))"
_ITS_NAME = r"\$\(DDPJOB_NAME\)|\$\{?DDPJOB_NAME\}?"
FIX = "without dns: all only node 0 has a DNS name; add spec.dns: all"


def other_node(text: str, job: str) -> str:
    """The first DNS name of a node of this job other than 0 that a text has, with a number or in the place of one a
    variable; "": none."""
    name = f"(?:{re.escape(job)}|{_ITS_NAME})"
    found = re.search(rf"(?<![\w.-]){name}-{_NUMBER}\.{name}(?![\w-])", text)
    return found[0] if found else ""


@rule(
    "warning",
    wrong='hosts = ["digits-0.digits", "digits-1.digits"]',
    right="dns: all  # in the spec of the job",
)
def other_node_named(script: Script, job: Job) -> Iterator[Found]:
    """Only where the job is known. A pod that the job's Service does not select has no DNS name, and unless spec.dns is
    all the Service selects node 0 alone: the name of another node does not resolve."""
    if not job.only_leader_has_name:
        return
    documents = {node.value for node in script.nodes if isinstance(node, ast.Expr)}
    for node in script.nodes:
        if node not in documents and (name := other_node(_text(node), job.name)):
            yield at(node, f"{name}: {FIX}")


def _text(node: ast.AST) -> str:
    """A text of the script, with {} for what is computed; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

"""What a shell's script tells the launcher about the machine on which it runs, in variables of the job.

From a list of words such options are removed. A script keeps them in their places, with other values: `$VK_TASK_INDEX`
or the name of a Volcano pod means nothing in a DDPJob, and $RANDOM is another rendezvous on each node.
"""

from __future__ import annotations

import re

from ddpjob_convert.address import VARIABLES
from ddpjob_operator.job.variables import OF_OTHER_LAUNCHERS

_OF_THE_JOB = {
    "node_rank": "$NODE_RANK",
    "master_addr": "$MASTER_ADDR",
    "master_port": "$MASTER_PORT",
    "rdzv_endpoint": "$MASTER_ADDR:$MASTER_PORT",
    "rdzv_id": "$PET_RDZV_ID",
}
_LAUNCHER = re.compile(r"\b(?:torchrun|ddprun|torch\.distributed\.(?:run|launch))\b")
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\$\([^()]*\)|[^\s\"'\\;&|])+"
_NAMES = "|".join(name.replace("_", "[-_]") for name in _OF_THE_JOB)
_OPTION = re.compile(rf"--(?P<name>{_NAMES})(?P<is>=|(?:\s|\\\n)+)(?P<value>{_VALUE})")
_OWN = re.compile(r"\$[({]?(?:PET_)?(?:NODE_RANK|MASTER_ADDR|MASTER_PORT|RDZV_ID|RDZV_ENDPOINT)\b")
_ASSIGNED = re.compile(rf"(?<![-\w$])({'|'.join(sorted(VARIABLES))})=({_VALUE})?")
_OF_OTHERS = re.compile(rf"\$[({{]?({OF_OTHER_LAUNCHERS.pattern})")


def by_job(script: str) -> tuple[str, list[tuple[str, str]]]:
    """The script with the job's values for these options of its launcher, and (option as it was, new value) of each
    that changes. Those that have a variable of the job already stay."""
    changed = []

    def value(found: re.Match[str]) -> str:
        if _OWN.search(found["value"]):
            return found[0]
        new = _OF_THE_JOB[found["name"].replace("-", "_")]
        changed.append((found[0], new))
        return f"--{found['name']}{found['is']}{new}"

    launcher = _LAUNCHER.search(script)
    begin = launcher.end() if launcher else len(script)
    return script[:begin] + _OPTION.sub(value, script[begin:]), changed


def assigned(script: str) -> list[str]:
    """Variables of the job to which the script gives values of its own, not made of the job's value."""
    return list(dict.fromkeys(name for name, value in _ASSIGNED.findall(script) if name not in value))


def of_others(text: str) -> list[str]:
    """Variables that the text reads and that only another scheduler or launcher sets."""
    return list(dict.fromkeys(_OF_OTHERS.findall(text)))

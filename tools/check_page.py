"""Write docs/check.md from the rules of `ddpjob check`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

from ddpjob_check import RULES, Finding, Rule
from ddpjob_check.job import YAML_RULES

EXAMPLE = Finding(
    "train.py",
    41,
    1,
    "rank-is-local-rank",
    "error",
    'init_process_group(rank=local_rank): on 2 nodes two processes get rank 0; use int(os.environ["RANK"])',
)
INTRO = f"""\
<!-- Written from the rules by `python tools/check_page.py`. Change them, then run it again. -->
# ddpjob check: mistakes that are found before they cost a GPU hour

```console
$ ddpjob check train.py --nodes 2
{EXAMPLE}
$ ddpjob check job.yaml                 # the job, and the script that its command starts
$ ddpjob check job.yaml src/train.py    # the script has another path here than in the image
$ ddpjob check .                        # all scripts, notebooks and DDPJobs here, but those in .gitignore
$ ddpjob check train.ipynb              # code cells: train.ipynb:cell 3:2: error[…]
$ ddpjob check train.py --format json   # findings (file, line, column, rule, severity, message), errors, warnings
```

The script is read, never run or imported, and torch need not be installed. Values and calls are followed through names,
attributes and the functions of the file, not into other files. **A rule that is not sure reports nothing**, so "nothing
found" is no proof. A script that imports Lightning, Accelerate, Transformers or a similar framework need not do what
the framework does by itself.

A job tells the rules its nodes, processes, GPUs, backend, volumes and launcher. Without a job, `--nodes` and `--nproc`
do; without these, a mistake that matters on several nodes only is a warning. A script that sets `localhost` as the
address of its rendezvous, as tutorials do, then counts as one for one node.

**An error is certain**: this run will fail, hang, or train something else. A finding of a rule with the severity error
is a warning if its line may not run: it needs an option that is not given, or is in a function that nothing calls.
Options of argparse have the values of the job's command, else their defaults. A mistake that only matters in a cluster
is a warning in `ddpjob run`.

The rules `elastic-…` are for jobs whose number of nodes may change, by `minNodes` or `torchrun --nnodes=MIN:MAX`
([elastic.md](elastic.md)), and for a script with `--nodes MIN:MAX`. They report nothing for other jobs.

Each file gets three seconds of CPU time. In scripts of many thousand lines the rules that take longer are skipped, and
the warning `left-out` names them.

Exit codes: 0 nothing or warnings only, 1 errors, 2 wrong input (no such file, no valid job, no valid Python).

`ddpjob run` checks the same before it starts anything. An error stops it with exit code 2, unless `--no-check` is
given.

To suppress a finding: `# ddpjob: ignore[rule]`, with several rules between commas, at the end of its line or alone on
the line above, in Python and in YAML.
"""

YAML = """\
## In the YAML

Fields of the wrong type, misspelled fields and invalid quantities (`cpu: lots`) are refused with their line by
`check`, `run` and `run --dry-run` alike. In addition:
"""

TAIL = """\
## What it does not read

Other files that the script imports; values that come from click or a configuration file, or that `exec`, `globals()`,
a star import or `setattr` may have changed; what a shell script does before it starts Python. The official tutorial
"Writing distributed applications" has two of these mistakes in some of its versions, `batch_size=128 / float(size)`
and `download=True` on every rank: both findings are correct.
"""


def to_markdown() -> str:
    """Return docs/check.md."""
    rows = "".join(f"| [`{r.name}`](#{r.name}) | {r.severity} |\n" for r in RULES)
    table = f"| rule | severity |\n|---|---|\n{rows}"
    return "\n".join(
        (INTRO, "## The rules\n", table, *(part for rule in RULES for part in _rule(rule)), YAML, _of_yaml(), TAIL)
    )


def _of_yaml() -> str:
    rows = "".join(f"| `{r.name}` | {r.severity} | {r.why} |\n" for r in YAML_RULES)
    return f"| rule | severity | meaning |\n|---|---|---|\n{rows}"


def _rule(rule: Rule) -> Iterator[str]:
    yield f"### `{rule.name}`\n"
    yield textwrap.fill(rule.why, 120, break_long_words=False, break_on_hyphens=False) + "\n"
    yield f"```python\n{_lines('wrong', rule.wrong)}{_lines('right', rule.right)}```\n"


def _lines(label: str, code: str) -> str:
    return f"# {label}\n{code}\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())

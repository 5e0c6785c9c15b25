"""Rules about commands that do not do what they seem to: variables that are unset or never expanded, and arguments of
the script that the launcher takes for its own options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any

from ddpjob_check.schedulers import COUNTERPARTS
from ddpjob_operator.job import api, launcher, variables
from ddpjob_operator.job.facts import JobFacts
from ddpjob_operator.job.launch import command, programs, shell_text
from ddpjob_operator.job.podspec import mappings

# Variables that every rank has, but the pod only if it has one rank; the value is the pod's variable to use instead.
_OF_RANKS = {
    "RANK": "NODE_RANK is the node's",
    "WORLD_SIZE": "NNODES are the nodes, DDPJOB_WORLD_SIZE all ranks",
    "LOCAL_RANK": "a script that reads it runs in each rank: torchrun --no-python sh -c '…'",
    "LOCAL_WORLD_SIZE": "NPROC_PER_NODE is the same",
}
_KUBERNETES_NAME = re.compile(r"(?<!\$)(?:\$\$)*\$\(([A-Za-z_]\w*)\)")
_SHELL_NAME = re.compile(
    r"(?P<before>(?<!\$)(?:\$\$)*)\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<operator>\}|:?[-=+?]|[%#/^,:])|(?P<plain>[A-Za-z_]\w*))"
)
_ALWAYS_SET = {"HOME", "HOSTNAME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PWD", "PYTHONPATH", "SHELL", "TMPDIR", "USER"}
_TILDE = re.compile(r"(?:^|(?<==))~(?:/|$)")
_GLOB = re.compile(r"[\w./~@:-]*(?:(?<![.)\]\\])\*|\?)[\w./*?-]*")
_SUBSTITUTION = re.compile(r"[\w./:=@,-]*(?:(?P<name>\$\([a-z][\w-]*)(?:\s[^()]*)?\)|`[a-z][^`]*`)[\w./:=@,-]*")
_OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1", "&>", "2>", "|&"}
_NO_VALUES = {"&&", "2>&1", "&>", "2>", "|&"}
_FILTERS = set("awk cat cut grep head less sed sort tail tee tr ts uniq wc xargs".split())
# Names in scripts that expand path patterns themselves.
_EXPANDS_PATTERNS = ("glob", "braceexpand", "load_dataset", "WebDataset")
_REDIRECTION = re.compile(r"(?:[12]|&)>{1,2}(?:&[12]|[\w./-]+)|>{1,2}[\w.-]*/[\w./-]+")
_OPTIONS_SHOWN = 3
# Options of a launcher that must not be empty. Others, such as --rdzv_id and --log_dir, may be empty.
_NEEDED = {"nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "max_restarts"}
_NO_SHELL = "no shell reads the command, so the program gets this text"
_BY_SHELL = "start it with a shell: [sh, -c, …]"


def taken_arguments(job: api.DDPJob) -> Iterator[str]:
    """Yield a sentence for each argument of the script that abbreviates options of torchrun."""
    words = job.spec.facts.command
    scripts = [words[place] for place, is_read_by_pod in shell_text.scripts(words) if is_read_by_pod]
    commands = [one for text in scripts for one in command.shell_commands(text)] if scripts else [words]
    for one in commands:
        begin = command.options_begin(one)
        if begin is None or programs.name(one[begin - 1]) == "ddprun":
            continue
        rest = command.read_options(one[begin:])[1]
        own = list(itertools.takewhile(lambda word: word not in _OPERATORS, rest[1:]))
        for argument, options in command.abbreviations(own, one[begin - 1]):
            shown = [*options[:_OPTIONS_SHOWN], *(["…"] if len(options) > _OPTIONS_SHOWN else [])]
            yield (
                f"{argument}: torchrun reads it as an abbreviation of one of its options ({', '.join(shown)}) and ends "
                "with “ambiguous option” if its Python is older than 3.12.8; write -- between script and arguments"
            )


def unset_variables(job: api.DDPJob, given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (rule, sentence) for each variable that the command reads but nothing sets. given: names of variables from
    outside the job, such as the caller's in a local run."""
    facts = job.spec.facts
    if facts.trainer.get("envFrom"):
        return
    words, own = facts.command, {name: str(value or "") for name, value in facts.env.items()}
    scripts = [words[place] for place, is_read_by_pod in shell_text.scripts(words) if is_read_by_pod]
    named = {name for name, _ in launcher.of_ranks(job.spec)}  # reported as variable-of-ranks
    has_ranks = job.spec.facts.nproc_per_node == 1 and facts.min_nodes is None
    for name in () if has_ranks else _OF_RANKS:
        if name in own or name in named:
            continue
        if how := _how_read(name, [*words, *own.values()], scripts, default_counts=job.spec.nodes == 1):
            text = f"{how}: not set before the launcher has started the ranks; {_OF_RANKS[name]}"
            yield "variable-of-ranks-unset", text
    yield from _of_other_launchers(facts, {*own, *given}, scripts)


def _of_other_launchers(facts: JobFacts, own: set[Any], scripts: list[str]) -> Iterator[tuple[str, str]]:
    found = [ref.name for text in scripts for ref in shell_text.references(text)]
    names = dict.fromkeys(n for n in found if variables.OF_OTHER_LAUNCHERS.fullmatch(n) and n not in own)
    for name in names:
        if how := _how_read(name, facts.command, scripts, default_counts=True):
            text = f"{how}: neither Slurm nor MPI starts the job, so nothing sets it; {_counterpart(name)}"
            is_certain = _ends_the_start(name, facts.started, scripts)
            yield "variable-of-other-launcher" if is_certain else "variable-of-other-launcher-unset", text


def _ends_the_start(name: str, started: command.Command, scripts: list[str]) -> bool:
    """True if the launcher or the script certainly fails if the variable is empty: it needs a number or an address."""
    options = " ".join(value for option, value in started.options.items() if option in _NEEDED)
    through = [other for text in scripts for other in re.findall(rf"\b(\w+)=\S*\$\{{?{name}\b", text)]
    if any(re.search(rf"\$\{{?{one}\b(?!:?[-=+])", options) for one in (name, *through)):
        return True
    words = started.words
    values = [word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in words]
    return name in COUNTERPARTS and any(value in (f"${name}", f"${{{name}}}") for value in values)


def _counterpart(name: str) -> str:
    meant = COUNTERPARTS.get(name)
    if meant is None:
        return "a DDPJob has NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT"
    return _OF_RANKS.get(meant, f"{meant} is meant")


def _how_read(name: str, words: list[str], scripts: list[str], *, default_counts: bool) -> str:
    """Return the first reference to a variable as written, or "" if there is none. Skip scripts that set or test the
    variable. default_counts: also skip references with a default, such as ${NAME:-0}: it may be correct."""
    if any(name == found for word in words for found in _KUBERNETES_NAME.findall(word)):
        return f"$({name})"
    for text in scripts:
        is_asked = re.search(rf"-[nzv]\s+[\"']?\$?\{{?{name}\b", text)
        if shell_text.sets(text, name) or is_asked:
            continue
        for ref in shell_text.references(text):
            has_value = ref.operator and (default_counts or not ref.operator.endswith("-"))
            if ref.name == name and not has_value:
                return f"${{{name}{ref.operator}…}}" if ref.operator else f"${name}"
    return ""


def unexpanded(job: api.DDPJob, script: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (path in the trainer, sentence) for each word that needs a shell, if no shell reads it. script: the text of
    the job's script, which may expand $NAME, ~ and * itself."""
    yield from _in_env(job, script)
    words, env = job.spec.facts.command, set(job.spec.facts.env)
    by_shell = {place for place, _ in shell_text.scripts(words)}
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        if i in by_shell or (before == "-c" and any("python" in earlier for earlier in words[:i])):
            continue
        if "expandvars" not in script and (said := _variable(word, env)):
            yield ("command",), f"{word}: {_NO_SHELL}; {said}"
        elif _TILDE.search(word) and "expanduser" not in script:
            text = f"{word}: {_NO_SHELL}, and most programs do not expand ~ themselves; write the whole path"
            yield ("command",), text
        elif i and _is_glob(word, before) and not any(name in script for name in _EXPANDS_PATTERNS):
            text = f"{word}: {_NO_SHELL} and must expand the pattern; if it does not, list the files, or {_BY_SHELL}"
            yield ("command",), text
        elif i and (_is_substitution(word, env) or _is_operator(word, before, words[i + 1 : i + 2])):
            yield ("command",), f"{word}: {_NO_SHELL}; {_BY_SHELL}"


def _in_env(job: api.DDPJob, script: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Check env as `unexpanded` checks words: PATH: /opt/bin:$PATH. Only known names count: passwords may contain $."""
    entries = mappings(job.spec.facts.trainer, "env")
    known = {*_ALWAYS_SET, *variables.BREAKS_RENDEZVOUS, *(str(entry.get("name")) for entry in entries)}
    for number, entry in enumerate(entries):
        value = str(entry.get("value", ""))
        names = [found["braced"] or found["plain"] for found in _SHELL_NAME.finditer(value)]
        if (name := next((name for name in names if name in known), "")) and "expandvars" not in script:
            why = f"Kubernetes replaces only $({name}), by an earlier entry of env"
            yield ("env", number), f"{entry.get('name')}={value}: no shell reads it, so the value is this text; {why}"


def _variable(word: str, env: set[str]) -> str:
    for found in _SHELL_NAME.finditer(word):
        name = found["braced"] or found["plain"]
        known = name in env or name in variables.BREAKS_RENDEZVOUS or name in _ALWAYS_SET
        if not known and not _looks_like_a_variable(word, found):
            continue
        if found["operator"] not in (None, "}"):
            return _BY_SHELL
        if name in _OF_RANKS and name not in env:
            return _OF_RANKS[name]
        if name in env or name in variables.BREAKS_RENDEZVOUS:
            return f"write $({name}), which Kubernetes replaces"
        return f"set {name} in env and write $({name}), which Kubernetes replaces; or {_BY_SHELL}"
    return ""


def _looks_like_a_variable(word: str, found: re.Match[str]) -> bool:
    """True if a name that the job does not set is probably a variable, not part of a pattern or a formula."""
    name = found["braced"] or found["plain"]
    if not name.isupper() or len(name) < 2:
        return False
    before, after = word[: found.start()][-1:], word[found.end() :][:1]
    return bool(found["braced"]) or (before in ("", *"=/:,@") and after in ("", *"/.:,_-"))


def _is_glob(word: str, before: str) -> bool:
    """True for a path pattern. False after an option for a pattern without a folder, such as --include *.py."""
    is_pattern = _GLOB.fullmatch(word) is not None and ("/" in word or re.search(r"\*\.\w+$", word) is not None)
    return is_pattern and "://" not in word and ("/" in word or not before.startswith("-"))


def _is_substitution(word: str, env: set[str]) -> bool:
    """True for $(hostname) and `date`, which need a shell. Kubernetes replaces only $(NAME) of a variable in env."""
    found = _SUBSTITUTION.fullmatch(word)
    return found is not None and (found["name"] or "")[2:] not in env


def _is_operator(word: str, before: str, following: list[str]) -> bool:
    """True for an operator of a shell, unless it may be the value of an option: --delimiter ";", --op ">"."""
    if word in _NO_VALUES or _REDIRECTION.fullmatch(word):
        return True
    if not before.startswith("-") or "=" in before:
        return word in _OPERATORS
    after = following[0] if following else ""
    return after in _FILTERS if word == "|" else word in (">", ">>", "<") and re.search("[./]", after) is not None

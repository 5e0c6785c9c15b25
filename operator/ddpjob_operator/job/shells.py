"""The shell around a launcher: exit codes that it loses, and signals that it keeps to itself."""

from __future__ import annotations

from collections.abc import Iterator

from ddpjob_operator.job import command, exit_codes, programs, shell
from ddpjob_operator.job.exit_codes import Fate

_WITHOUT_PIPEFAIL = ("sh", "dash")
_TRAPPED = frozenset("TERM SIGTERM 15 EXIT 0".split())
# Wrappers that become what they start, or hand a signal over to it alone.
_IN_FRONT = frozenset("env exec gosu nice ionice numactl setsid stdbuf su-exec tini taskset".split())
_HOW = {
    "pipe": ("the shell takes that of the end of the pipe, `{at}`", "{pipefail}"),
    "or": ("`{at}` takes its place", "leave that out, or end it with `exit 1`"),
    "next": ("the shell goes on with `{at}`, and ends with that one's", "begin with `set -e`, or join them with `&&`"),
    "background": (
        "it runs in the background (`&`), and the shell does not wait",
        "start it without `&`, or `wait $!`",
    ),
    "wait": ("`wait` without a process ends with 0", "use `wait $!`"),
    "if": ("`{at}` only tests it", "add an `else` with `exit 1`"),
    "while": ("`{at}` only tests it", "end with `exit 1` after it"),
    "not": ("`!` turns a failure into 0", "leave the `!` out"),
    "words": ("it runs within the words of another command, `{at}`", "give it a line of its own"),
    "exit": ("the shell ends with 0 in any case{at}", "end with `exit $rc`, where `rc=$?` stands right behind it"),
    "trap": ("`{at}` sets another one", "leave the `exit` out of the trap"),
    "program": ("`{at}` ends with 0 in any case", "give it -e"),
}
_FIX_OF_PIPE = {
    True: "use bash in place of sh, and begin with `set -o pipefail;`",
    False: "begin with `set -o pipefail;`",
}
PIPEFAIL_IN_SH = (
    "`set -o pipefail` in sh: where that is dash (Debian, Ubuntu) it has none, and ends at once with 2; use bash"
)
KEEPS_SIGNALS = (
    "the shell in front of {launcher} gets SIGTERM and does not hand it over, so nothing is saved when the pod is "
    "drained or the job is stopped; `exec {launcher} …` as the last command gets it"
)


def lost_exit_codes(words: list[str]) -> Iterator[str]:
    """A sentence for each launcher whose failure the shell hides."""
    said = dict.fromkeys(lost_exit_code(fate) for fate in exit_codes.fates(words) if fate.lost)
    yield from said


def lost_exit_code(fate: Fate) -> str:
    """the exit code of torchrun is lost: …; what it means, and the fix."""
    how = fate.at if fate.lost == "if" and fate.at in _HOW else fate.lost
    why, fix = _HOW[how]
    at = f" (`{fate.at}`)" if how == "exit" and fate.at else fate.at
    fix = fix.format(pipefail=_FIX_OF_PIPE[fate.shell in _WITHOUT_PIPEFAIL])
    means = "so a failed training counts as done"
    if fate.launcher == "ddprun":
        means = "so only ddprun's own report tells of a failure"
    return f"the exit code of {fate.launcher} is lost: {why.format(at=at)}, {means}; {fix}"


def pipefail_in_sh(words: list[str]) -> bool:
    """True if a script for sh sets an option that many a sh does not have."""
    for program, options, script in _scripts(words):
        if program in _WITHOUT_PIPEFAIL:
            sets = (node for node in shell.walk(script) if isinstance(node, shell.Simple))
            if "pipefail" in options or any(_sets_pipefail(node) for node in sets):
                return True
    return False


def keeps_signals(words: list[str]) -> str:
    """The launcher that gets no SIGTERM because a shell waits for it and does not hand signals over; "" if there is
    none, or nobody can know it.

    A shell may become the last simple command of its script (bash does, dash of Debian 12 does not): nothing is said
    of that. It never becomes what stands in a pipe, a function, a compound command, or before another command.
    """
    top = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), None)
    if top is None or any(programs.name(word) not in _IN_FRONT for word in words[:top] if not word.startswith("-")):
        return ""
    _, text, _ = exit_codes.shell_call(words[top:])
    try:
        script = shell.parse(text) if text is not None else None
    except shell.ShellSyntaxError:
        return ""
    if script is None or _hands_signals_over(script):
        return ""
    return _kept_from(script, is_last=True)


def _scripts(words: list[str]) -> Iterator[tuple[str, set[str], shell.ShellScript]]:
    """Each shell that the command starts by its words: its program, options and script."""
    for i in programs.places(words):
        if programs.name(words[i]) not in command.SHELLS:
            continue
        options, text, _ = exit_codes.shell_call(words[i:])
        try:
            script = shell.parse(text) if text is not None else None
        except shell.ShellSyntaxError:
            return
        if script is not None:
            yield programs.name(words[i]), options, script
            for node in shell.walk(script):
                if isinstance(node, shell.Simple):
                    yield from _scripts([word.value for word in node.words])
        return


def _sets_pipefail(node: shell.Simple) -> bool:
    values = [word.value for word in node.words]
    return values[:1] == ["set"] and "pipefail" in values


def _hands_signals_over(script: shell.ShellScript) -> bool:
    """trap 'kill $!' TERM; …; wait: a shell runs its trap at once only while it waits by `wait`."""
    nodes = [*shell.walk(script)]
    simple = [[word.value for word in node.words] for node in nodes if isinstance(node, shell.Simple)]
    functions = {node.name: node.text for node in nodes if isinstance(node, shell.Function)}
    done = [values[1] for values in simple if values[:1] == ["trap"] and _TRAPPED.intersection(values[2:])]
    kills = any("kill" in text or "kill" in functions.get(text.split(None, 1)[0], "") for text in done if text.strip())
    return kills and any(values[:1] == ["wait"] for values in simple)


def _kept_from(node: shell.ShellNode, *, is_last: bool) -> str:
    """The launcher below this command that the shell stays in front of."""
    if isinstance(node, shell.ShellScript):
        last = len(node.parts) - 1
        found = (_kept_from(part, is_last=is_last and i == last) for i, part in enumerate(node.parts))
        return next(filter(None, found), "")
    if isinstance(node, shell.AndOr):
        items = [node.first, *(other for _, other in node.rest)]
        found = (_kept_from(item, is_last=is_last and item is items[-1]) for item in items)
        return next(filter(None, found), "")
    if isinstance(node, shell.Simple):
        return _kept_from_simple(node, is_last=is_last)
    is_apart = isinstance(node, (shell.Pipeline, shell.Background)) or (
        isinstance(node, shell.GroupNode) and node.subshell
    )
    if is_apart:
        return next(filter(None, (_below(child) for child in shell.children(node))), "")
    return next(filter(None, (_kept_from(child, is_last=False) for child in shell.children(node))), "")


def _kept_from_simple(node: shell.Simple, *, is_last: bool) -> str:
    values = [word.value for word in node.words]
    becomes = values[:1] == ["exec"]
    inside = next(filter(None, (_below(child) for child in shell.children(node))), "")
    if inside or becomes or (is_last and not any(word.beside for word in shell.words_of(node))):
        return inside or keeps_signals(values[becomes:])
    return _below(node)


def _below(node: shell.ShellNode) -> str:
    """The launcher that a command, or one below it, starts."""
    for one in shell.walk(node):
        values = [word.value for word in one.words] if isinstance(one, shell.Simple) else []
        started = command.read(values[1:] if values[:1] == ["exec"] else values) if values else command.Command()
        if started.launcher not in ("", "python"):
            return started.launcher
    return ""

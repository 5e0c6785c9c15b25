"""Warnings about the shell script around a launcher: lost exit codes, and a SIGTERM that is not forwarded."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from ddpjob_operator.job.launch import command, exit_codes, programs, shell
from ddpjob_operator.job.launch.exit_codes import LauncherExit

_WITHOUT_PIPEFAIL = ("sh", "dash")
_TRAPPED = frozenset("TERM SIGTERM 15 EXIT 0".split())
_TRAPPED_BY_DASH = frozenset("TERM 15".split())
# Wrappers that exec their command, or forward SIGTERM to it and to no other process.
_PASS_SIGNALS = frozenset("env exec gosu nice ionice numactl setsid stdbuf su-exec tini taskset".split())
# Programs that start their command as a child and do not forward SIGTERM to it.
_STAY_IN_FRONT = frozenset("find flock parallel runuser script strace su time watch xargs".split())
_KILLS = re.compile(r"kill(?:\s+-(?:-signal[ =]|[sn]\s*)?(?:SIG)?(TERM|INT|HUP|QUIT|KILL|USR1|USR2|\d{1,2})\b)?", re.I)
# In dash no job is a process group, and `jobs` prints nothing in a command substitution.
_MISSES_IN_DASH = re.compile(r"\bkill\b[^;&|]*?\s(?:%|\$\(jobs|`jobs)")
_KILLS_ALL = re.compile(r"\bkill\b.*(?:\s0\b|\s-\d*\$)|pkill|killall")
# Signals after which a launcher saves. torchrun forwards SIGINT to its ranks too, but background jobs ignore SIGINT.
_STOPS = {"", "TERM", "15"}
_STOPS_DDPRUN = {*_STOPS, "INT", "2", "HUP", "1"}
_HOW = {
    "pipe": ("the shell takes that of the last command in the pipe, `{at}`", "{pipefail}"),
    "or": ("`{at}` takes its place", "remove it, or end it with `exit 1`"),
    "next": (
        "the shell goes on with `{at}` and returns its exit code",
        "begin with `set -e`, or join the two with `&&`",
    ),
    "background": (
        "it runs in the background (`&`), and the shell does not wait",
        "start it without `&`, or `wait $!`",
    ),
    "wait": ("`wait` without a process returns 0", "use `wait $!`"),
    "if": ("`{at}` only tests it", "add an `else` with `exit 1`"),
    "while": ("`{at}` only tests it", "end with `exit 1` after it"),
    "not": ("`!` turns a failure into 0", "remove the `!`"),
    "words": ("it is started inside another command, `{at}`", "put it on its own line"),
    "exit": ("the shell always returns 0{at}", "write `rc=$?` directly after it, and end with `exit $rc`"),
    "trap": ("`{at}` sets another one", "remove the `exit` from the trap"),
    "setsid": ("`{at}` starts it in the background and exits at once", "use `setsid --wait`"),
    "detached": ("`{at}` starts it in the background and exits at once", "start it in the foreground"),
    "program": ("`{at}` always returns 0", "give it -e"),
    "find": ("`{at}` always returns 0", "put it on its own line"),
}
_FIX_OF_PIPE = {
    True: "use bash in place of sh, and begin with `set -o pipefail;`",
    False: "begin with `set -o pipefail;`",
}
PIPEFAIL_IN_SH = (
    "`set -o pipefail` in sh: dash (sh in Debian and Ubuntu) does not know this option and exits at once with 2; use "
    "bash"
)
_NO_SIGTERM = (
    "{shell} in front of {launcher} does not forward SIGTERM to it, so nothing is saved when the pod is drained or the "
    "job is stopped; end the script with `exec {launcher} …`"
)
_ENDS_TOO_EARLY = (
    "the shell in front of {launcher} exits once its trap for SIGTERM has run. This ends the container, so {launcher} "
    "is killed while it saves; `wait` in the trap as well"
)


def lost_exit_codes(words: list[str]) -> Iterator[str]:
    """Yield a sentence for each launcher whose failure the shell hides."""
    yield from dict.fromkeys(_lost_exit_code(one) for one in exit_codes.launcher_exits(words) if one.lost)


def _lost_exit_code(found: LauncherExit) -> str:
    why, fix = _HOW[found.at if found.lost == "if" and found.at in _HOW else found.lost]
    at = f" (`{found.at}`)" if found.lost == "exit" and found.at else found.at
    fix = fix.format(pipefail=_FIX_OF_PIPE[found.shell in _WITHOUT_PIPEFAIL])
    means = "so a failed training counts as done"
    if found.launcher == "ddprun":
        means = "so only ddprun's own report shows a failure"
    return f"the exit code of {found.launcher} is lost: {why.format(at=at)}, {means}; {fix}"


def pipefail_in_sh(words: list[str]) -> bool:
    """True if a script for sh sets `pipefail`, which dash does not have."""
    return any(
        "pipefail" in options
        or any(v[:1] == ["set"] and "pipefail" in v for v in map(shell.values, shell.walk(script)))
        for program, options, script in _scripts(words)
        if program in _WITHOUT_PIPEFAIL
    )


def sigterm_warning(words: list[str]) -> str:
    """Return a sentence if the shell keeps SIGTERM from a launcher, or leaves it no time to save; else ""."""
    for shell_named, sh_is_dash in (("the shell", False), ("dash (sh in Debian and Ubuntu)", True)):
        if launcher := without_sigterm(words, sh_is_dash=sh_is_dash):
            return _NO_SIGTERM.format(shell=shell_named, launcher=launcher)
    signals = _signals(words, sh_is_dash=True)
    launcher = signals.killed_early() if signals else ""
    return _ENDS_TOO_EARLY.format(launcher=launcher) if launcher else ""


def without_sigterm(words: list[str], *, sh_is_dash: bool = False) -> str:
    """Return the launcher that gets no SIGTERM because a shell waits for it; "" if there is no such launcher, or if
    this is unknown. A shell that execs a command leaves the signal to it. bash and busybox exec the last simple
    command of a script, dash (0.5.12) only one after `exec`; no shell does in a pipeline, function or compound
    command. With a trap or redirection, bash never execs (execute_cmd.c)."""
    signals = _signals(words, sh_is_dash=sh_is_dash)
    with contextlib.suppress(shell.ShellSyntaxError):
        return signals.unreached() if signals else ""
    return ""


def _signals(words: list[str], *, sh_is_dash: bool) -> _Signals | None:
    top = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), None)
    front = {programs.name(word) for word in words[:top] if "=" not in word}
    if top is None or {"tini", "-g"} <= front or any(not w.startswith("-") for w in front - _PASS_SIGNALS):
        return None
    _, text, _ = command.shell_call(words[top:])
    with contextlib.suppress(shell.ShellSyntaxError):
        script = shell.parse(text) if text is not None else None
        started, program = exit_codes.launchers(tuple(words)), programs.name(words[top])
        return _Signals(script, started, program, sh_is_dash=sh_is_dash) if script else None
    return None


def cut_short(words: list[str]) -> str:
    """Return the launcher or interpreter that a shell starts without arguments: `sh -c torchrun train.py`; else ""."""
    _, text, _ = command.shell_call(words) if command.is_shell(words) else ((), None, ())
    if not text or text == words[-1]:
        return ""
    name = programs.name(text)
    return text if command.starts_scripts(name) else ""


def _scripts(words: list[str]) -> Iterator[tuple[str, set[str], shell.ShellScript]]:
    """Yield each shell that the command starts with a script after -c: its program, options and script."""
    place = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), len(words))
    options, text, _ = command.shell_call(words[place:])
    with contextlib.suppress(shell.ShellSyntaxError):
        if text is not None:
            script = shell.parse(text)
            yield programs.name(words[place]), options, script
            for node in shell.walk(script):
                yield from _scripts(shell.values(node))


class _Signals:
    """The processes that get the SIGTERM of a shell. started: the commands that start a launcher, with its name."""

    def __init__(
        self, script: shell.ShellScript, started: Mapping[shell.ShellNode, str], program: str, *, sh_is_dash: bool
    ) -> None:
        self._script, self._started, self._program, self._sh_is_dash = script, started, program, sh_is_dash
        self._is_dash = program in (_WITHOUT_PIPEFAIL if sh_is_dash else ("dash",))
        self._execs_last = not self._is_dash
        nodes = [*shell.walk(script)]
        self._functions = {node.name: node for node in nodes if isinstance(node, shell.Function)}
        self._jobs = [node for node in nodes if isinstance(node, shell.Background)]
        simple = [words for node in nodes if (words := shell.values(node))]
        self._traps = [words for words in simple if words[0] == "trap" and words[1:2] != ["-"]]
        self._waits = sum(words[0] == "wait" for words in simple)
        self._loops = any(isinstance(node, shell.Loop) for node in nodes)

    def unreached(self) -> str:
        """Return the launcher that does not get the shell's SIGTERM; "" if all get it."""
        # On SIGTERM bash runs an EXIT trap at once, but a TERM trap only during `wait` or after a command in a loop.
        at_once = self._waits or self._loops or any({"EXIT", "0"}.intersection(words[2:]) for words in self._traps)
        stops = self._stopping_traps() if at_once else []
        if any(_KILLS_ALL.search(text) for text in stops):
            return ""
        if stops:
            return _first(self._unreached_job(job.body) for job in self._jobs)
        return self._unreached(self._script, is_last=True)

    def killed_early(self) -> str:
        """Return the launcher that a trap signals, if the shell exits afterwards without waiting for it; else ""."""
        texts = self._stopping_traps()
        if not texts or any(re.search(r"\b(?:wait|sleep|while|until)\b", text) for text in texts):
            return ""
        waits_again = self._waits > 1 or self._loops
        exits = not waits_again or any(re.search(r"\bexit\b", text) for text in texts)
        return _first(map(self._below, self._jobs)) if exits and (self._waits or self._loops) else ""

    def _stopping_traps(self) -> list[str]:
        """Return the texts of SIGTERM traps that send a signal after which the launcher saves."""
        trapped = _TRAPPED_BY_DASH if self._is_dash else _TRAPPED
        texts = [words[1] for words in self._traps if trapped.intersection(words[2:]) and words[1].strip()]
        texts = [self._functions[name].text if (name := text.split()[0]) in self._functions else text for text in texts]
        texts = [_MISSES_IN_DASH.sub("", text) for text in texts] if self._is_dash else texts
        stops = _STOPS_DDPRUN if {*self._started.values()} == {"ddprun"} else _STOPS
        return [text for text in texts if stops.intersection(name.upper() for name in _KILLS.findall(text))]

    def _unreached_job(self, node: shell.ShellNode) -> str:
        """Return the launcher that misses a signal to a background job, which may be a shell around the launcher."""
        words = shell.values(node)
        if words and words[0] in self._functions:
            return self._unreached(self._functions[words[0]].body, is_last=False)
        if isinstance(node, shell.GroupNode) and (node.subshell or self._is_dash):
            body = shell.ShellScript((node.body,))
            subshell = _Signals(body, self._started, self._program, sh_is_dash=self._sh_is_dash)  # inherits no traps
            subshell._execs_last = True  # dash execs the last command in a subshell, too
            return subshell._unreached(body, is_last=True)
        return self._unreached_by_exec(words, self._below(node)) if words else self._unreached(node, is_last=False)

    def _unreached(self, node: shell.ShellNode, *, is_last: bool) -> str:
        """Return the first launcher in `node` that the shell waits for. is_last: the script ends after `node`."""
        if isinstance(node, shell.Simple):
            return self._unreached_simple(node, is_last=is_last)
        items = [*shell.children(node)]
        if isinstance(node, (shell.Pipeline, shell.Background)) or (
            isinstance(node, shell.GroupNode) and node.subshell
        ):
            return _first(map(self._below, items))
        is_list = isinstance(node, (shell.ShellScript, shell.AndOr))
        return _first(self._unreached(item, is_last=is_last and is_list and item is items[-1]) for item in items)

    def _unreached_simple(self, node: shell.Simple, *, is_last: bool) -> str:
        words = [*itertools.dropwhile(lambda word: word in ("command", "builtin"), shell.values(node))]
        execs = words[:1] == ["exec"]
        if inside := _first(map(self._below, shell.children(node))):
            return inside
        if node.document and words[execs:] and programs.name(words[execs]) in command.SHELLS:
            read = shell.parse(node.document[-1])  # a shell that reads a file does not exec the last command
            return self._unreached(read, is_last=False) if execs else self._below(read)
        if words[:1] == ["eval"]:
            return self._unreached(shell.parse(" ".join(words[1:])), is_last=False)
        is_redirected = self._program == "bash" and bool(node.targets or node.document)
        is_plain = not (self._traps or is_redirected or any(word.beside for word in shell.words_of(node)))
        below = self._below(node)
        if execs or (is_last and is_plain and self._execs_last):
            return self._unreached_by_exec(words[execs:], below)
        return below

    def _unreached_by_exec(self, words: list[str], below: str) -> str:
        """Return the launcher `below` if the program that starts it does not forward signals to it; else ""."""
        names = [programs.name(words[i]) for i in programs.places(words)]
        front = [*itertools.takewhile(lambda name: name in programs.WRAPPERS or name.startswith("-"), names)]
        stays = _STAY_IN_FRONT.intersection((*front, *names[:1])) or {"setsid", "-w"} <= {*front}
        return below if stays else without_sigterm(words, sh_is_dash=self._sh_is_dash)

    def _below(self, node: shell.ShellNode) -> str:
        """Return the launcher that this command, or a command inside it, starts."""
        return _first(self._started.get(one) or _launcher(shell.values(one)) for one in shell.walk(node))


def _launcher(words: list[str]) -> str:
    return _first(exit_codes.launchers(tuple(words)).values()) if words else ""


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")

"""The shell around a launcher: exit codes that it loses, and signals that it keeps to itself."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from ddpjob_operator.job import command, exit_codes, programs, shell
from ddpjob_operator.job.exit_codes import Fate

_WITHOUT_PIPEFAIL = ("sh", "dash")
_TRAPPED = frozenset("TERM SIGTERM 15 EXIT 0".split())
_TRAPPED_BY_DASH = frozenset("TERM 15".split())
# Wrappers that become what they start, or hand a signal over to it alone.
_IN_FRONT = frozenset("env exec gosu nice ionice numactl setsid stdbuf su-exec tini taskset".split())
# What starts its command as a child, and does not hand SIGTERM over to it.
_STAY_IN_FRONT = frozenset("find flock parallel runuser script strace su time watch xargs".split())
_KILLS = re.compile(r"kill(?:\s+-(?:-signal[ =]|[sn]\s*)?(?:SIG)?(TERM|INT|HUP|QUIT|KILL|USR1|USR2|\d{1,2})\b)?", re.I)
# In dash no job is a process group, and `jobs` prints nothing in a command substitution.
_MISSES_IN_DASH = re.compile(r"\bkill\b[^;&|]*?\s(?:%|\$\(jobs|`jobs)")
_KILLS_ALL = re.compile(r"\bkill\b.*(?:\s0\b|\s-\d*\$)|pkill|killall")
# What lets a launcher save. torchrun hands SIGINT over to its ranks, which a shell's job is deaf to.
_STOPS = {"", "TERM", "15"}
_STOPS_DDPRUN = {*_STOPS, "INT", "2", "HUP", "1"}
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
    "setsid": ("`{at}` starts it apart, and ends at once", "use `setsid --wait`"),
    "program": ("`{at}` ends with 0 in any case", "give it -e"),
    "find": ("`{at}` ends with 0 in any case", "give it a line of its own"),
}
_FIX_OF_PIPE = {
    True: "use bash in place of sh, and begin with `set -o pipefail;`",
    False: "begin with `set -o pipefail;`",
}
PIPEFAIL_IN_SH = (
    "`set -o pipefail` in sh: where that is dash (Debian, Ubuntu) it has none, and ends at once with 2; use bash"
)
_KEEPS_SIGNALS = (
    "{shell} in front of {launcher} gets SIGTERM and does not hand it over, so nothing is saved when the pod is "
    "drained or the job is stopped; `exec {launcher} …` as the last command gets it"
)
_ENDS_BEFORE = (
    "the shell in front of {launcher} ends as soon as its trap for SIGTERM has run, and the container with it, so "
    "{launcher} is killed while it saves; `wait` in the trap as well"
)


def lost_exit_codes(words: list[str]) -> Iterator[str]:
    """A sentence for each launcher whose failure the shell hides."""
    yield from dict.fromkeys(lost_exit_code(fate) for fate in exit_codes.fates(words) if fate.lost)


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
            simple = ([w.value for w in node.words] for node in shell.walk(script) if isinstance(node, shell.Simple))
            if "pipefail" in options or any(values[:1] == ["set"] and "pipefail" in values for values in simple):
                return True
    return False


def signals_kept(words: list[str]) -> str:
    """A sentence if a shell in front of the launcher keeps SIGTERM to itself; "" if none does, or it is not known."""
    for shell_named, sh_is_dash in (("the shell", False), ("sh, where that is dash (Debian, Ubuntu),", True)):
        if by := keeps_signals(words, sh_is_dash=sh_is_dash):
            return _KEEPS_SIGNALS.format(shell=shell_named, launcher=by)
    reader = _reader(words, sh_is_dash=True)
    return _ENDS_BEFORE.format(launcher=reader.ends_before()) if reader and reader.ends_before() else ""


def keeps_signals(words: list[str], *, sh_is_dash: bool = False) -> str:
    """The launcher that gets no SIGTERM because a shell waits for it and does not hand signals over; "" if there is
    none, or nobody can know it.

    bash and busybox become the last simple command of a script, dash (0.5.12) never does. No shell becomes what stands
    in a pipe, a function, a compound command, or before another command; bash (execute_cmd.c) neither one with a
    redirection, nor any once a trap is set.
    """
    reader = _reader(words, sh_is_dash=sh_is_dash)
    with contextlib.suppress(shell.ShellSyntaxError):
        return reader.kept() if reader else ""
    return ""


def _reader(words: list[str], *, sh_is_dash: bool) -> _Signals | None:
    top = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), None)
    front = {programs.name(word) for word in words[:top] if "=" not in word}
    if top is None or {"tini", "-g"} <= front or any(not w.startswith("-") for w in front - _IN_FRONT):
        return None
    _, text, _ = exit_codes.shell_call(words[top:])
    if text is None:
        return None
    started, program = exit_codes.launchers(tuple(words)), programs.name(words[top])
    try:
        return _Signals(shell.parse(text), started, program, sh_is_dash=sh_is_dash)
    except shell.ShellSyntaxError:
        return None


def cut_short(words: list[str]) -> str:
    """The launcher or interpreter that a shell starts alone, as in `sh -c torchrun train.py`; "" if there is none."""
    _, text, _ = exit_codes.shell_call(words) if command.is_shell(words) else ((), None, ())
    if not text or text == words[-1]:
        return ""
    name = programs.name(text)
    return text if name in command.LAUNCHERS or command.PYTHON.fullmatch(name) else ""


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


class _Signals:
    """Where the SIGTERM that a shell gets goes to.

    started: the commands of its script that start a launcher, with its name.
    """

    def __init__(
        self, script: shell.ShellScript, started: Mapping[shell.ShellNode, str], program: str, *, sh_is_dash: bool
    ) -> None:
        self._script, self._started, self._program, self._sh_is_dash = script, started, program, sh_is_dash
        self._is_dash = program in (_WITHOUT_PIPEFAIL if sh_is_dash else ("dash",))
        self._becomes_last = not self._is_dash
        self._nodes = [*shell.walk(script)]
        self._functions = {node.name: node for node in self._nodes if isinstance(node, shell.Function)}
        simple = [[word.value for word in node.words] for node in self._nodes if isinstance(node, shell.Simple)]
        self._traps = [values for values in simple if values[:1] == ["trap"] and values[1:2] != ["-"]]
        self._waits = any(values[:1] == ["wait"] for values in simple) or any(
            isinstance(node, shell.Loop) for node in self._nodes
        )

    def kept(self) -> str:
        """The launcher that does not get it."""
        # bash runs a trap for EXIT at once, another one while it waits by `wait`, or between the commands of a loop.
        at_once = self._waits or any({"EXIT", "0"}.intersection(values[2:]) for values in self._traps)
        done = self._stopped_by()
        if at_once and any(_KILLS_ALL.search(text) for text in done):
            return ""
        if at_once and done:
            jobs = [node.body for node in self._nodes if isinstance(node, shell.Background)]
            return self._first(self._kept_from_job(job) for job in jobs)
        return self._kept_from(self._script, is_last=True)

    def ends_before(self) -> str:
        """The launcher that gets the signal from a trap, and that the shell does not wait for then."""
        texts = self._stopped_by()
        waits = [node for node in self._nodes if isinstance(node, shell.Simple) and node.text.split()[:1] == ["wait"]]
        stays = len(waits) > 1 or any(isinstance(node, shell.Loop) for node in self._nodes)
        if not texts or any(re.search(r"\b(?:wait|sleep|while|until)\b", text) for text in texts):
            return ""
        is_left = not stays or any(re.search(r"\bexit\b", text) for text in texts)
        jobs = [node for node in self._nodes if isinstance(node, shell.Background)]
        return self._first(self._below(job) for job in jobs) if is_left and self._waits else ""

    def _stopped_by(self) -> list[str]:
        """What the traps for SIGTERM run, if it sends a signal that lets the launcher save."""
        trapped = _TRAPPED_BY_DASH if self._is_dash else _TRAPPED
        done = [values[1] for values in self._traps if trapped.intersection(values[2:]) and values[1].strip()]
        done = [self._functions[text.split()[0]].text if text.split()[0] in self._functions else text for text in done]
        done = [_MISSES_IN_DASH.sub("", text) for text in done] if self._is_dash else done
        stops = _STOPS_DDPRUN if {*self._started.values()} == {"ddprun"} else _STOPS
        return [text for text in done if stops.intersection(name.upper() for name in _KILLS.findall(text))]

    def _kept_from_job(self, node: shell.ShellNode) -> str:
        """The launcher that does not get a signal for a job: the job may be a shell around it."""
        values = [word.value for word in node.words] if isinstance(node, shell.Simple) else []
        if values[:1] and values[0] in self._functions:
            return self._kept_from(self._functions[values[0]].body, is_last=False)
        if isinstance(node, shell.GroupNode) and (node.subshell or self._is_dash):
            body = shell.ShellScript((node.body,))  # a subshell has no traps
            inside = _Signals(body, self._started, self._program, sh_is_dash=self._sh_is_dash)
            inside._becomes_last = True  # dash as well, if it is a job
            return inside._kept_from(body, is_last=True)
        return self._in_place(values, self._below(node)) if values else self._kept_from(node, is_last=False)

    def _kept_from(self, node: shell.ShellNode, *, is_last: bool) -> str:
        """The launcher below this command that the shell stays in front of."""
        if isinstance(node, shell.ShellScript):
            last = node.parts[-1] if node.parts else None
            return self._first(self._kept_from(part, is_last=is_last and part is last) for part in node.parts)
        if isinstance(node, shell.AndOr):
            items = [node.first, *(other for _, other in node.rest)]
            return self._first(self._kept_from(item, is_last=is_last and item is items[-1]) for item in items)
        if isinstance(node, shell.Simple):
            return self._kept_from_simple(node, is_last=is_last)
        is_apart = isinstance(node, (shell.Pipeline, shell.Background)) or (
            isinstance(node, shell.GroupNode) and node.subshell
        )
        if is_apart:
            return self._first(self._below(child) for child in shell.children(node))
        return self._first(self._kept_from(child, is_last=False) for child in shell.children(node))

    def _kept_from_simple(self, node: shell.Simple, *, is_last: bool) -> str:
        values = [word.value for word in node.words]
        while values[:1] in (["command"], ["builtin"]):
            values = values[1:]
        becomes = values[:1] == ["exec"]
        inside = self._first(self._below(child) for child in shell.children(node))
        if inside:
            return inside
        if node.document and values[becomes:] and programs.name(values[becomes]) in command.SHELLS:
            read = shell.parse(node.document[-1])  # from a file a shell becomes no command but by exec
            return self._kept_from(read, is_last=False) if becomes else self._below(read)
        if values[:1] == ["eval"]:
            return self._kept_from(shell.parse(" ".join(values[1:])), is_last=False)
        is_redirected = self._program == "bash" and bool(node.targets or node.document)
        is_plain = not (self._traps or is_redirected or any(w.beside for w in shell.words_of(node)))
        below = self._below(node)
        if becomes or (is_last and is_plain and self._becomes_last):
            return self._in_place(values[becomes:], below)
        return below

    def _in_place(self, values: list[str], below: str) -> str:
        """The launcher that does not get a signal for the program that these words start. below: the one it starts."""
        names = [programs.name(values[i]) for i in programs.places(values)]
        front = [*itertools.takewhile(lambda name: name in programs.WRAPPERS or name.startswith("-"), names)]
        stays = _STAY_IN_FRONT.intersection((*front, *names[:1])) or {"setsid", "-w"} <= {*front}
        return below if stays else keeps_signals(values, sh_is_dash=self._sh_is_dash)

    def _below(self, node: shell.ShellNode) -> str:
        """The launcher that a command, or one below it, starts."""
        return self._first(self._started.get(one) or _started_by(one) for one in shell.walk(node))

    @staticmethod
    def _first(found: Iterable[str]) -> str:
        return next(filter(None, found), "")


def _started_by(node: shell.ShellNode) -> str:
    values = [word.value for word in node.words] if isinstance(node, shell.Simple) else []
    return next(iter(exit_codes.launchers(tuple(values)).values()), "") if values else ""

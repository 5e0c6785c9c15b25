"""Follow the exit code of a launcher through a shell script: `torchrun … | tee log`, `|| true`, traps, `set -e`.

The script is walked without running it. In one walk all commands succeed. Then there is one walk for each launcher, in
which only this launcher fails. If the script ends with 0 on every path of that walk, the launcher's exit code is lost.
A test with an unknown result is taken both ways. A script that cannot be followed gives no answer, because a warning
about a correct script is worse than none.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from ddpjob_operator.job.launch import command, programs, shell, withheld
from ddpjob_operator.job.launch.shell_state import FAILED, JOB, ShellState

PATHS_MAX = 64
RANK = "a rank"
WORK_MAX = 150_000
"""The most characters that are parsed or created while one command is followed, in the operator's event loop."""
STEP_WORK = 200
_TESTS = frozenset("[ [[ (( test grep egrep fgrep zgrep cmp diff pgrep mountpoint expr let read".split())
_FILE_TESTS = frozenset("ls stat file readlink realpath".split())
_FILTERS = frozenset("grep egrep fgrep zgrep".split())
_NEVER_FAIL = frozenset("true : echo printf date sleep sync cd pushd popd pwd touch mkdir shift export unset".split())
_AWKS = frozenset("awk gawk mawk".split())
_DECLARES = frozenset("local export declare readonly typeset".split())
_BECOMES_NEXT = frozenset("exec command builtin nohup time env".split())
# Matches a word that is itself a shell script: ssh host "cd /app && torchrun train.py".
_SCRIPT = re.compile(r"\s(?:torchrun|ddprun|python)|(?:torchrun|ddprun|python)[\d.]*\s")

_States = list[ShellState]
_Builtin = Callable[[list[str], shell.Simple, ShellState, bool], _States]


class LauncherExit(Struct, frozen=True):
    """The effect of one launcher's failure on the exit code of the script."""

    launcher: str
    """torchrun, ddprun, …; python if the script starts no launcher; RANK for a program that a rank's shell starts."""
    lost: str = ""
    """How the launcher's exit code is lost: pipe, or, next, wait, if, not, words, exit, trap, …; "" if it is not."""
    at: str = ""
    """The text that loses the exit code: `| tee log`."""
    shell: str = ""
    replaced: bool = False
    """True if another launcher may run after this one's failure, without a proof of success (ddprun leaves one)."""
    certain: bool = False
    """True if the script fails on every path on which no other launcher replaces this one."""
    started: command.Command = field(default_factory=command.Command)
    withheld: withheld.Withheld = withheld.NOTHING
    """Variables of the job that the launcher does not have on any path."""

    @property
    def starts_a_script(self) -> bool:
        """True for torchrun, python …; False for a program in a rank's shell, and for a file such as train.sh."""
        return self.launcher != RANK and not is_training_file(self.launcher)


class _TooMuchError(Exception):
    """Following the script would need too many paths or too much work."""


_CANNOT_FOLLOW = (shell.ShellSyntaxError, _TooMuchError, RecursionError)


class _Work:
    """The work (in characters) that is left for all walks through one command."""

    def __init__(self) -> None:
        self._left = WORK_MAX
        self._parsed: set[str] = set()

    def take(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise _TooMuchError

    def parse(self, text: str) -> shell.ShellScript:
        """Parse a script. A text that was parsed before costs no work."""
        if text not in self._parsed:
            self.take(len(text))
            self._parsed.add(text)
        return shell.parse(text)


def launcher_exits(words: list[str]) -> tuple[LauncherExit, ...]:
    """Return the effect of each launcher's failure; () if the command cannot be followed."""
    return _launcher_exits(tuple(words)) if sum(map(len, words)) <= command.SCRIPT_READ_MAX else ()


@functools.lru_cache(maxsize=256)
def launchers(words: tuple[str, ...]) -> Mapping[shell.ShellNode, str]:
    """Return the simple commands that start a launcher, with its name; {} if the command cannot be followed."""
    walk = _ScriptWalk(frozenset(), _Work())
    try:
        walk.ends(_as_command(words))
    except _CANNOT_FOLLOW:
        return {}
    named = {node: started.launcher for node, started in walk.started.items() if started.launcher != "python"}
    return {node: name for node, name in named.items() if not is_training_file(name)}


def zero_proves_success(words: list[str]) -> bool | None:
    """True if exit code 0 proves that the last launcher ended with 0. False if the shell hides a failure of the
    launcher, and None if this is unknown."""
    if not any(programs.name(word) in (*command.SHELLS, "script") for word in words):
        return True if command.read(words).launcher not in ("", "python") else None
    found = launcher_exits(words)
    if any(one.lost for one in found):
        return False
    return True if found and all(one.certain and one.starts_a_script for one in found) else None


def is_training_file(name: str) -> bool:
    """True for a script file that probably starts the training: train.sh. Its text is not known here."""
    return name.endswith(".sh") and (any(w in name for w in ("train", "tune", "launch")) or name == "run.sh")


def _as_command(words: tuple[str, ...]) -> shell.Simple:
    return shell.Simple(words=tuple(map(shell.Word, words)), text=" ".join(words))


@functools.lru_cache(maxsize=256)
def _launcher_exits(words: tuple[str, ...]) -> tuple[LauncherExit, ...]:
    top, work = _as_command(words), _Work()
    succeeding = _ScriptWalk(frozenset(), work)
    found: dict[shell.ShellNode, LauncherExit] = {}
    try:
        succeeding.ends(top)
        while (node := next((n for n in succeeding.started if n not in found), None)) is not None:
            found[node] = _launcher_exit(top, node, succeeding, work)
    except _CANNOT_FOLLOW:
        return ()
    by_launcher = tuple(one for one in found.values() if one.launcher not in ("python", RANK))
    others = tuple(one for one in found.values() if one.launcher == (RANK if by_launcher else "python"))
    # The program that trains is unknown, so warn only if the exit codes of all programs are lost.
    is_certain = all(one.lost for one in others) or len(found) == 1
    return (*by_launcher, *(others if is_certain else ()))


def _launcher_exit(top: shell.Simple, node: shell.ShellNode, succeeding: _ScriptWalk, work: _Work) -> LauncherExit:
    walk = _ScriptWalk(frozenset({node}), work)
    ends = [state for state in walk.ends(top) if state.failed]
    if not ends:  # this launcher starts only if the launchers before it fail
        walk = _ScriptWalk(frozenset(succeeding.started), work)
        ends = [state for state in walk.ends(top) if state.failed]
    for other, started in walk.started.items():
        succeeding.started.setdefault(other, started)
    own = succeeding.started[node]

    def is_replaced(state: ShellState) -> bool:
        """True if another launcher ran on this path only because this one failed: `torchrun a.py || torchrun b.py`."""
        others = [walk.started[n] for n in state.after if not any(node in ran for ran in succeeding.ran_before[n])]
        return any(other.launcher != "python" or other.files == own.files for other in others)

    alone = [state for state in ends if not is_replaced(state)]
    after = {walk.started[other].launcher for state in ends for other in state.after}
    zero = [state for state in alone if state.status == "0"]
    is_lost = bool(zero) and not any(state.status == FAILED for state in ends)
    how, at = zero[0].loss if is_lost else ("", "")
    return LauncherExit(
        RANK if node in succeeding.in_ranks else own.launcher,
        lost=how or ("exit" if is_lost else ""),
        at=at,
        shell=walk.shell_of.get(node, ""),
        replaced=bool(after - {"ddprun", "python"}) or len(alone) < len(ends),
        certain=all(state.status == FAILED for state in alone),
        started=own,
        withheld=succeeding.withheld.get(node, withheld.NOTHING),
    )


class _ScriptWalk:
    """A walk through a script in which the launchers `failing` fail and all other commands succeed. Methods take a
    command, the state before it, and `tested` (`set -e` ignores a failure), and return the states in which it may
    end."""

    def __init__(self, failing: frozenset[shell.ShellNode], work: _Work) -> None:
        self.failing = failing
        self._work = work
        self.started: dict[shell.ShellNode, command.Command] = {}
        self.ran_before: dict[shell.ShellNode, list[frozenset[shell.ShellNode]]] = collections.defaultdict(list)
        """The launchers that ran before each launcher, by path."""
        self.shell_of: dict[shell.ShellNode, str] = {}
        self.withheld: dict[shell.ShellNode, withheld.Withheld] = {}
        self.in_ranks: set[shell.ShellNode] = set()
        self._rank_shells = 0  # 1 in the shell of a rank: torchrun --no-python bash -c "…"
        self._pipes = 0  # the number of pipelines around the current command
        self._by_type: dict[type, Callable[..., _States]] = {
            shell.ShellScript: self._script, shell.AndOr: self._and_or, shell.Pipeline: self._pipeline,
            shell.Background: self._background, shell.GroupNode: self._group, shell.If: self._if,
            shell.Loop: self._loop, shell.Case: self._case, shell.Function: self._function, shell.Simple: self._simple,
        }  # fmt: skip
        self._builtins: dict[str, _Builtin] = {
            "exit": self._exit, "return": self._exit, "set": _set, "trap": _trap, "wait": _wait, "fg": _wait,
            "eval": self._eval, "kill": _kill, "setsid": self._setsid,
            **dict.fromkeys(("break", "continue"), lambda words, _n, state, _t: state.ended(leaving=words[0])),
            **dict.fromkeys(("script", "su", "runuser", "flock"), self._command_option),
            **dict.fromkeys(withheld.CARRIERS, self._carrier), "unset": _unset,
        }  # fmt: skip

    def ends(self, top: shell.Simple) -> _States:
        return self._simple(top, ShellState(), False)

    def run(self, node: shell.ShellNode, state: ShellState, tested: bool) -> _States:
        self._work.take(STEP_WORK + state.size)
        return _distinct(self._by_type[type(node)](node, state, tested))

    def _script(self, node: shell.ShellScript, state: ShellState, tested: bool) -> _States:
        now = [state]
        for part in node.parts:
            if shell.values(part) or not isinstance(part, shell.Simple):  # `rc=$?` keeps the exit code
                now = [before if before.leaving else before.ignoring("next", part.text) for before in now]
            now = _distinct(_then(now, functools.partial(self.run, part, tested=tested)))
        return now

    def _and_or(self, node: shell.AndOr, state: ShellState, tested: bool) -> _States:
        now = self.run(node.first, state, True)
        for operator, other in node.rest:
            ends: _States = []
            wanted = "0" if operator == "&&" else FAILED
            is_tested = tested or other is not node.rest[-1][1]
            for before in now:
                if before.leaving or before.status != wanted:
                    ends.append(before)
                if not before.leaving and before.status in (wanted, ""):
                    before = before.ignoring("or", f"|| {other.text}") if operator == "||" else before
                    ends += self.run(other, replace(before, status=wanted), is_tested)
            now = ends
        return now

    def _pipeline(self, node: shell.Pipeline, state: ShellState, tested: bool) -> _States:
        if len(node.parts) == 1:
            return _then(self.run(node.parts[0], state, True), ShellState.inverted)
        now: list[tuple[ShellState, tuple[str, ...]]] = [(state, ())]
        tested = tested or node.negated
        self._pipes += 1
        for part in node.parts:
            now = [(end, (*codes, end.status)) for before, codes in now for end in self._subshell(part, before, tested)]
        self._pipes -= 1
        ends: _States = []
        for end, codes in now:
            codes = (*codes[:-1], "0") if _is_filter(node.parts[-1]) else codes
            status = next((code for code in codes if code != "0"), "0") if end.pipefail else codes[-1]
            if status == "0" and FAILED in codes[:-1]:
                rest = [part.text for part in node.parts[codes.index(FAILED) + 1 :]]
                end = end.losing("pipe", f"| {' | '.join(rest)}")
            end = replace(end, status=status, pipe=codes)
            ends += end.inverted() if node.negated else self._checked(end, tested)
        return ends

    def _background(self, node: shell.Background, state: ShellState, _tested: bool) -> _States:
        ends: _States = []
        for end in self._subshell(node.body, state, True):
            variables = {**state.variables, "!": f"{JOB}{len(state.jobs)}"}
            jobs = (*state.jobs, end.status)
            ends += end.losing("background", "&").ended(jobs=jobs, variables=variables)
        return ends

    def _subshell(self, node: shell.ShellNode, state: ShellState, tested: bool) -> _States:
        """Return the states after a subshell. Only its exit status and its launchers affect the outer shell."""
        inside = replace(state, traps={}, jobs=())
        return [_outside(state, end) for last in self.run(node, inside, tested) for end in self._exit_trap(last)]

    def _exit_trap(self, state: ShellState) -> _States:
        text = state.traps.get("EXIT")
        if not text:
            return [state]
        ends: _States = []
        for end in self.run(self._work.parse(text), replace(state, leaving="", traps={}, trapped=state.status), False):
            status = end.status if end.leaving == "exit" else state.status
            if state.status == FAILED and status == "0":
                end = end.losing("trap", f"trap '{text}' EXIT", again=True)
            ends += end.ended(status)
        return ends

    def _checked(self, state: ShellState, tested: bool) -> _States:
        """Return the states after a command, with `set -e` and the ERR trap applied."""
        if state.status != FAILED or tested:
            return [state]
        ends = [state]
        if text := state.traps.get("ERR"):
            ends = self.run(self._work.parse(text), replace(state, traps={**state.traps, "ERR": ""}), True)
            ends = [end if end.leaving else replace(end, status=FAILED, traps=state.traps) for end in ends]
        return [replace(end, leaving="exit") if state.errexit and not end.leaving else end for end in ends]

    # ---- compound commands ---------------------------------------------------------------------------------

    def _group(self, node: shell.GroupNode, state: ShellState, tested: bool) -> _States:
        ends: _States = []
        for before in self._substitutions(node, state):
            if not node.subshell:
                ends += self.run(node.body, before, tested)
            else:
                ends += _then(self._subshell(node.body, before, tested), lambda end: self._checked(end, tested))
        return ends

    def _if(self, node: shell.If, state: ShellState, tested: bool) -> _States:
        ends, now = [], self._substitutions(node, state)
        for condition, body in node.branches:
            others: _States = []
            for end in itertools.chain.from_iterable(self.run(condition, before, True) for before in now):
                if end.leaving:
                    ends.append(end)
                    continue
                if end.status != FAILED:
                    ends += self.run(body, replace(end, status="0"), tested)
                if end.status != "0":
                    others.append(end.ignoring("if", "if"))
            now = others
        for end in now:
            ends += self.run(node.otherwise, end, tested) if node.otherwise else end.ended()
        return ends

    def _loop(self, node: shell.Loop, state: ShellState, tested: bool) -> _States:
        """Return the states after a loop, which runs up to twice. Its status is the last body's, or 0."""
        ends: _States = []
        now = [(before, "0") for before in self._substitutions(node, state)]
        may_run_once = node.condition is None and len(node.over) < 2
        for turn in range(2):
            entering: _States = []
            for before, last in now:
                found, left = self._condition(node, before, last)
                entering += found
                ends += left
            now = []
            for before in entering:
                variables = {name: value for name, value in before.variables.items() if name != node.name}
                for end in self.run(node.body, replace(before, variables=variables), tested):
                    if end.leaving in ("", "continue"):
                        now.append((replace(end, leaving=""), end.status))
                    else:
                        ends += end.ended(leaving="") if end.leaving == "break" else [end]
            if node.condition is None and (turn or may_run_once):
                ends += [replace(end, status=last) for end, last in now]
            if len(now) + len(ends) > PATHS_MAX:
                raise _TooMuchError
        return ends

    def _condition(self, node: shell.Loop, state: ShellState, last: str) -> tuple[_States, _States]:
        """Return the states in which the body begins, and those after the loop. last: status of the previous pass."""
        if node.condition is None:
            return [state], []
        inside: _States = []
        after: _States = []
        wanted = "0" if node.kind == "while" else FAILED
        for end in self.run(node.condition, state, True):
            if end.leaving:
                after.append(end)
                continue
            if end.status in (wanted, ""):
                inside.append(end)
            if end.status != wanted:
                after += end.ignoring("if", node.kind).ended(last)
        return inside, after

    def _case(self, node: shell.Case, state: ShellState, tested: bool) -> _States:
        ends: _States = []
        for before in self._substitutions(node, state):
            matched = False
            for patterns, body in node.branches:
                matches = [before.matches(node.word.value, pattern) for pattern in patterns]
                if not matched and any(match is not False for match in matches):
                    ends += self.run(body, replace(before, status="0"), tested)
                matched = matched or True in matches
            ends += [] if matched else before.ended()
        return ends

    def _function(self, node: shell.Function, state: ShellState, _tested: bool) -> _States:
        return state.ended(functions={**state.functions, node.name: node.body})

    def _substitutions(self, node: shell.ShellNode, state: ShellState) -> _States:
        now = [state]
        for word in shell.words_of(node):
            for inner in word.runs:
                now = [end for before in now for end in self._subshell(inner, before, False)]
            for inner in word.beside:
                now = [end for before in now for end in self._subshell(inner, before, True)]
                now = [end.ignoring("words", "<( )") for end in now]
        return now

    # ---- simple commands -----------------------------------------------------------------------------------

    def _simple(self, node: shell.Simple, state: ShellState, tested: bool) -> _States:
        has_runs = any(word.runs for word in shell.words_of(node))
        words = state.expanded(node, self._work.take)
        state = state.calculated(node, words)
        ends: _States = []
        for before in self._substitutions(node, state):
            own = before.status if has_runs else "0"
            before = replace(before, status=state.status)
            if not words or (len(words) == 1 and words[0].startswith(("$(", "`")) and has_runs):
                done = before.assigned([(name, word.value) for name, word in node.assigned], own, node.text)
            else:
                if own == FAILED and before.failed and not state.failed:
                    before = before.losing("words", node.text)
                done = self._program(words, node, before, tested)
            ends += _then(done, lambda end: self._checked(replace(end, pipe=(end.status,)), tested))
        return ends

    def _program(self, words: list[str], node: shell.Simple, state: ShellState, tested: bool) -> _States:
        if words[0] == "exec" and len(words) > 1:  # the program replaces the shell, and no trap runs
            ends = self._run_program(words, node, replace(state, traps={}), tested)
            return [end if end.leaving else replace(end, leaving="exit") for end in ends]
        return self._run_program(words, node, state, tested)

    def _run_program(self, words: list[str], node: shell.Simple, state: ShellState, tested: bool) -> _States:
        while words[0] in _BECOMES_NEXT and len(words) > 1:
            if words[1].startswith("-"):
                if words[0] == "command":
                    return state.ended("")  # as in `command -v torchrun`, which starts nothing
                break
            words = [*itertools.dropwhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), words[1:])]
            if not words:
                return state.ended()
        name = programs.name(words[0])
        if name in state.functions:
            ends = self.run(state.functions[name], replace(state, arguments=tuple(words[1:])), tested)
            ends = [replace(end, arguments=state.arguments) for end in ends]
            return [replace(end, leaving="") if end.leaving == "return" else end for end in ends]
        run = self._builtins.get(name, self._other_program)
        taken = withheld.by_words(words)
        if not taken.names:
            return run(words, node, state, tested)
        return [
            replace(end, withheld=state.withheld) for end in run(words, node, replace(state, withheld=taken), tested)
        ]

    def _other_program(self, words: list[str], node: shell.Simple, state: ShellState, tested: bool) -> _States:
        name = programs.name(words[0])
        place = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), None)
        if place is not None:
            return self._shell(words[place:], node, state)
        if (text := state.variables.get(_file(words[0]))) is not None:
            return self._shell(["sh", "-c", text, *words], node, state)
        if is_training_file(name):
            return self._script_file(words, node, state)
        if name in ("cat", "tee") and node.document:
            written = {_file(word.value): node.document[-1] for word in (*node.targets, *node.words[1:])}
            return state.ended(variables={**state.variables, **written})
        begin = _command_in(words) if name in ("find", "xargs") else 0
        if (started := _starts(words[begin:])) is not None:
            ends = self._launcher(words[begin:], node, started, state)
            hides = name == "find" and ";" in words[begin:]
            return _with_zero(ends, "find", "find -exec … ;") if hides else ends
        if name == "export" and words[1:2] == ["-n"]:
            return _unset(words[1:], node, state, tested)
        if name in _DECLARES:
            named = (word.partition("=") for word in words[1:])
            return state.assigned((n, text) for n, has_value, text in named if has_value)
        if name == "false" or name in _NEVER_FAIL:
            return state.ended(FAILED if name == "false" else "0")
        # `ls model.pt || exit 1`: the file exists only if the training wrote it.
        tests_file = name in _FILE_TESTS and any(not word.startswith("-") for word in words[1:])
        exits = name in _AWKS and any("exit" in word for word in words)
        is_test = name in _TESTS or tests_file or exits or (tested and not self._pipes)
        return state.ended(state.test(words) if is_test else "0")

    def _launcher(self, words: list[str], node: shell.Simple, started: command.Command, state: ShellState) -> _States:
        """Return the states after a launcher, which fails if a rank's shell does: torchrun --no-python bash -c "…"."""
        inner = next((i for i, word in enumerate(words) if programs.name(word) in command.SHELLS), 0)
        if "no_python" not in started.options or not inner:
            return [self._launched(node, started, state)]
        self._rank_shells += 1
        ranks = self._shell(words[inner:], node, replace(state, withheld=withheld.NOTHING))
        self._rank_shells -= 1
        ends = [self._launched(node, started, replace(end, withheld=state.withheld)) for end in ranks]
        is_own = node in self.failing
        return [end if is_own else replace(end, status=rank.status) for end, rank in zip(ends, ranks, strict=True)]

    def _launched(self, node: shell.Simple, started: command.Command, state: ShellState) -> ShellState:
        self.started[node] = started
        self.in_ranks.update([node] if self._rank_shells else ())
        self.shell_of[node] = state.program
        own = state.withheld.but([name for name, _ in node.assigned])
        self.withheld[node] = min(self.withheld.get(node, own), own, key=lambda one: len(one.names))
        self.ran_before[node].append(state.ran)
        ran = state.ran | {node}
        if node in self.failing:
            return replace(state, status=FAILED, failed=True, ran=ran, after=frozenset(), loss=("", ""))
        return replace(state, status="0", ran=ran, after=state.after | {node} if state.failed else state.after)

    def _shell(self, words: list[str], node: shell.Simple, state: ShellState) -> _States:
        options, text, rest = command.shell_call(words)
        if text is None:
            text = node.document[-1] if node.document else state.variables.get(_file(next(iter(rest), "")))
        if text is None:
            return self._script_file(rest, node, state)
        inside = replace(
            state,
            status="0",
            errexit="e" in options or "errexit" in options,
            pipefail="pipefail" in options,
            functions={},
            arguments=tuple(rest[2:]),
            program=programs.name(words[0]),
        )
        return [_outside(state, end) for end in self._subshell(self._work.parse(text), inside, False)]

    def _script_file(self, words: list[str], node: shell.Simple, state: ShellState) -> _States:
        """Return the states after a script file whose text is not known here: `bash train.sh`."""
        name = programs.name(words[0]) if words else ""
        return [self._launched(node, command.Command(name), state)] if is_training_file(name) else state.ended()

    # ---- builtins, and programs that run a command ---------------------------------------------------------

    def _exit(self, words: list[str], node: shell.Simple, state: ShellState, _tested: bool) -> _States:
        status = state.trapped if state.trapped and words[0] == "exit" else state.status
        if len(words) > 1:
            value = state.value(words[1])
            status = "" if value is None else "0" if value == "0" else FAILED
        if words[1:2] == ["0"]:
            state = state.losing("exit", node.text, again=True)
        return state.ended(status, leaving=words[0])

    def _eval(self, words: list[str], _node: shell.Simple, state: ShellState, tested: bool) -> _States:
        return self.run(self._work.parse(" ".join(words[1:])), state, tested)

    def _setsid(self, words: list[str], node: shell.Simple, state: ShellState, tested: bool) -> _States:
        """Return the states after setsid(1), which forks and ends with 0 as a container's first process."""
        rest = [*itertools.dropwhile(lambda word: word.startswith("-"), words[1:])]
        options = "".join(words[1 : len(words) - len(rest)])
        forks = not state.program or node.words[0].value == "exec" or "f" in options
        ends = self._program(rest, node, state, tested) if rest else [state]
        return _with_zero(ends, "setsid", "setsid") if forks and "w" not in options else ends

    def _command_option(self, words: list[str], node: shell.Simple, state: ShellState, _tested: bool) -> _States:
        """Run the command of `script -c "command"` or `su -c "command"` in a shell of its own."""
        at = next((i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*c|--command", word)), len(words))
        if at + 1 >= len(words):
            return self._other_program(words, node, state, False)
        ends = self._shell(["sh", "-c", words[at + 1]], node, state)
        keeps = words[0] != "script" or any(re.fullmatch(r"-[a-z]*e[a-z]*|--return", word) for word in words)
        return ends if keeps else _with_zero(ends, "program", "script")

    def _carrier(self, words: list[str], node: shell.Simple, state: ShellState, tested: bool) -> _States:
        """Return the states after a program that starts a command elsewhere, with options that are not known here."""
        begin = _command_in(words)
        if not begin:
            return self._other_program(words, node, state, tested)
        script = ["sh", "-c", words[begin]] if _SCRIPT.search(words[begin]) else words[begin:]
        ends = self._program(script, node, state, tested)
        return _with_zero(ends, "detached", words[0]) if withheld.detaches(words[:begin]) else ends


def _unset(words: list[str], node: shell.Simple, state: ShellState, _tested: bool) -> _States:
    taken = withheld.unset_by(node.text, words[1:])
    return state.ended(withheld=taken if taken.names else state.withheld)


def _set(words: list[str], _node: shell.Simple, state: ShellState, _tested: bool) -> _States:
    errexit, pipefail = state.errexit, state.pipefail
    for word, following in itertools.pairwise([*words[1:], ""]):
        if word.startswith(("-", "+")) and len(word) > 1:
            is_on, name = word[0] == "-", following if "o" in word else ""
            errexit = is_on if "e" in word or name == "errexit" else errexit
            pipefail = is_on if name == "pipefail" else pipefail
    return state.ended(errexit=errexit, pipefail=pipefail)


def _trap(words: list[str], _node: shell.Simple, state: ShellState, _tested: bool) -> _States:
    rest = [word for word in words[1:] if word != "--"]
    text, names = (rest[0], rest[1:]) if len(rest) > 1 else ("-", rest)
    named = dict.fromkeys(("EXIT" if name == "0" else name for name in names), "" if text == "-" else text)
    return state.ended(traps={**state.traps, **named})


def _wait(words: list[str], _node: shell.Simple, state: ShellState, _tested: bool) -> _States:
    """Return the states after `wait` or `fg`. `wait` alone returns 0; an unknown process may be any background job."""
    named = [word for word in words[1:] if word != "-f"] or (["$!"] if words[0] == "fg" else [])
    if not named:
        state = state.losing("wait", "wait", again=True) if FAILED in state.jobs else state
        return state.ended(jobs=())
    job = re.fullmatch(rf"{JOB}(\d+)", state.value(named[-1]) or "")
    if FAILED in (state.jobs[int(job[1]) : int(job[1]) + 1] if job else state.jobs):
        return state.ended(FAILED)
    return (state.losing("background", "&", again=True) if FAILED in state.jobs else state).ended()


def _kill(words: list[str], _node: shell.Simple, state: ShellState, _tested: bool) -> _States:
    """Return the states after `kill`: `kill $$` ends a shell with a signal, but not a container's first process."""
    values = [state.value(word) or "" for word in words[1:]]
    if "-0" in words or any(value.startswith(JOB) for value in values):
        return state.ended("")  # the process may or may not exist
    if any(value.startswith("%") for value in values) and not state.jobs:
        return state.ended(FAILED)
    kills_shell = bool({"$$", "0", "-$$"} & {*words[1:]})
    return [*(state.ended(FAILED, leaving="exit") if kills_shell else []), *state.ended()]


def _with_zero(ends: _States, how: str, at: str) -> _States:
    """Return the states after a program that exits with 0 even if the command that it runs fails."""
    return [replace(end.losing(how, at), status="0") for end in ends]


def _then(states: _States, following: Callable[[ShellState], _States]) -> _States:
    """Return the states after `following`, which runs in each state except after exit, return, break and continue."""
    return [end for state in states for end in ([state] if state.leaving else following(state))]


def _distinct(states: _States) -> _States:
    """Return each state once. Raise _TooMuchError if there are too many states."""
    different = list({state.key: state for state in states}.values())
    if len(different) > PATHS_MAX:
        raise _TooMuchError
    return different


def _outside(outer: ShellState, end: ShellState) -> ShellState:
    return replace(outer, status=end.status, failed=end.failed, ran=end.ran, after=end.after, loss=end.loss)


def _is_filter(part: shell.ShellNode) -> bool:
    """True for a final `grep -v warning` in a pipe, which succeeds if the ranks print anything. False for `grep -q`."""
    words = shell.values(part)
    is_quiet = any(re.match(r"-[a-zA-Z]*[qcl]|--(?:quiet|silent|count)", word) for word in words)
    return words[:1] != [] and words[0] in _FILTERS and not is_quiet


def _file(name: str) -> str:
    """Return the variable that holds the text of a file that the script writes."""
    return f"file {name.removeprefix('./')}"


def _command_in(words: list[str]) -> int:
    """Return the index of the command that a program with unknown options starts; 0 if it starts none."""
    for i, word in enumerate(words[: withheld.WORDS_MAX]):
        name = programs.name(word)
        if i and (name in command.SHELLS or command.starts_ranks(word) or _SCRIPT.search(word)):
            return i
        if i and (command.PYTHON.match(name) or name in programs.FRAMEWORKS or name in programs.WRAPPERS - {"exec"}):
            return i
    return 0


def _starts(words: list[str]) -> command.Command | None:
    found = command.read(words) if words else command.Command()
    return found if found.launcher and (found.launcher != "python" or found.files) else None

"""What becomes of the exit code of a launcher in a shell's script, and whether a signal reaches it.

The script is run in thought: a launcher fails, and every other command ends with 0. If the script then ends with 0 on
all paths, the launcher's exit code is lost. A test whose result nobody can know is taken both ways. What cannot be
followed gives no answer, so that nothing is said of it: a file that is sourced, a loop over many paths.
"""

from __future__ import annotations

import functools
import itertools
import operator as op
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddpjob_operator.job import command, programs, shell

PATHS_MAX = 64
WORK_MAX = 200_000
"""Characters read or made to follow one command. Tenants write it, and the operator's event loop reads it."""
STEP_WORK = 200
"""What one command of a script counts as, in characters."""
FAILED = "failed"
"""The text of an exit code that is some number but 0."""
_TEXT_MAX = 40
_TEST_WORDS_MAX = 60
_TESTS = frozenset("[ [[ (( test grep egrep fgrep zgrep cmp diff pgrep mountpoint expr let read".split())
_LOOKS_AT_FILES = frozenset("ls stat file readlink realpath".split())
_FILTERS = frozenset("grep egrep fgrep zgrep".split())
_NEVER_FAIL = frozenset("true : echo printf date sleep sync cd pwd touch mkdir shift export unset".split())
_AWKS = frozenset("awk gawk mawk".split())
_DECLARES = frozenset("local export declare readonly typeset".split())
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\}|(\?)|\{(\?)\}|(!)|\{(!)\})")
_ALL_OF_ARRAY = re.compile(r"\$\{[A-Za-z_]\w*\[@\]\}")
_PIPESTATUS = re.compile(r"^\$\{?PIPESTATUS(?:\[(\d)\])?\}?$")
_ARITHMETIC = re.compile(r"^\s*(!?)\s*(\$?\??\{?\w*\}?)\s*(?:(==|!=|<=|>=|<|>)\s*(\d+))?\s*$")
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": op.eq, "==": op.eq, "!=": op.ne, "-eq": op.eq, "-ne": op.ne, "-gt": op.gt, "-ge": op.ge, "-lt": op.lt,
    "-le": op.le, "<": op.lt, ">": op.gt, "<=": op.le, ">=": op.ge,
}  # fmt: skip
_CALCULATES: dict[str, Callable[[int, int], int]] = {"+": op.add, "-": op.sub, "*": op.mul}
_JOINS = (({"-o", "||"}, "0", FAILED), ({"-a", "&&"}, FAILED, "0"))
"""Words that join tests, the weaker first; the status of one part that decides, and that of all parts otherwise."""


@dataclass(frozen=True)
class Fate:
    """What becomes of one launcher in the script."""

    launcher: str
    """torchrun, ddprun, …; python where the script starts no launcher at all."""
    lost: str = ""
    """How its exit code gets lost: pipe, or, next, background, wait, if, not, words, exit, trap, program."""
    at: str = ""
    """The text that does it: `| tee log`."""
    shell: str = ""
    """The program of the shell around it."""
    replaced: bool = False
    """True if a launcher that may leave no trace of its success (any but ddprun) runs after it has failed."""
    certain: bool = False
    """True if the script certainly ends with another code than 0, unless another launcher decides."""


@dataclass(frozen=True)
class _State:
    """A shell on one path through its script."""

    status: str = "0"
    """$?: 0, FAILED, or "" where nobody can know it."""
    failed: bool = False
    """True if the launcher in question has run."""
    ran: frozenset[shell.ShellNode] = frozenset()
    """All launchers that have run."""
    after: frozenset[shell.ShellNode] = frozenset()
    """The launchers that have run since."""
    how: tuple[str, str] = ("", "")
    errexit: bool = False
    pipefail: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    traps: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, shell.ShellNode] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()
    """The statuses of what runs in the background."""
    pipe: tuple[str, ...] = ("0",)
    arguments: tuple[str, ...] = ()
    program: str = ""
    trapped: str = ""
    """The status that `exit` alone hands over within an EXIT trap: that of the shell before it."""

    @property
    def key(self) -> tuple[object, ...]:
        """The same for states between which nothing differs."""
        return tuple(tuple(value.items()) if isinstance(value, dict) else value for value in vars(self).values())

    @property
    def size(self) -> int:
        """How much is compared and copied with each step."""
        parts = (self.variables, self.functions, self.ran, self.after, self.jobs, self.arguments, self.pipe)
        return sum(map(len, parts))

    def lost(self, how: str, at: str) -> _State:
        """The state once the launcher's exit code is overwritten; the first time counts."""
        return replace(self, how=(how, at)) if self.failed and not self.how[0] else self


_Ends = list[tuple[_State, str]]
"""States with how the flow goes on: "", break, continue, return, exit."""


class _TooMuchError(Exception):
    """The script has more paths, or takes more work, than anybody wants to follow."""


class _Work:
    """The work that is left for one command, in all of its runs."""

    def __init__(self) -> None:
        self._left = WORK_MAX
        self._parsed: set[str] = set()

    def take(self, characters: int) -> None:
        """Raise _TooMuchError once there is none left."""
        self._left -= characters
        if self._left < 0:
            raise _TooMuchError

    def parse(self, text: str) -> shell.ShellScript:
        """Parse a script; the same one counts once."""
        if text not in self._parsed:
            self.take(len(text))
            self._parsed.add(text)
        return shell.parse(text)


def fates(words: list[str]) -> tuple[Fate, ...]:
    """What becomes of each launcher of a command; none where the command cannot be followed."""
    return _fates(tuple(words)) if sum(map(len, words)) <= command.SCRIPT_READ_MAX else ()


@functools.lru_cache(maxsize=256)
def launchers(words: tuple[str, ...]) -> Mapping[shell.ShellNode, str]:
    """The commands that start a launcher, below a command, with its name; none where the command cannot be followed."""
    top = shell.Simple(words=tuple(shell.Word(word) for word in words))
    run = _ScriptRun(frozenset(), _Work())
    try:
        run.ends(top)
    except (shell.ShellSyntaxError, _TooMuchError, RecursionError):
        return {}
    return {node: started.launcher for node, started in run.started.items() if started.launcher != "python"}


def may_be_replaced(words: list[str]) -> bool:
    """True if a launcher that leaves no trace of its success may run after one that has failed:
    `ddprun train.py || torchrun train.py`."""
    return any(fate.replaced for fate in fates(words))


def is_handed_over(words: list[str]) -> bool:
    """True if a container's exit code 0 proves that its last launcher has ended with 0: no shell is in between, or one
    whose script loses no exit code. False also where it cannot be followed."""
    if not any(programs.name(word) in (*command.SHELLS, "script") for word in words):
        return bool(command.read(words).launcher not in ("", "python"))
    found = fates(words)
    return bool(found) and all(fate.certain for fate in found)


@functools.lru_cache(maxsize=256)
def _fates(words: tuple[str, ...]) -> tuple[Fate, ...]:
    top = shell.Simple(words=tuple(shell.Word(word) for word in words), text=" ".join(words))
    try:
        work = _Work()
        first = _ScriptRun(frozenset(), work)
        first.ends(top)
        found: dict[shell.ShellNode, Fate] = {}
        while (node := next((n for n in first.started if n not in found), None)) is not None:
            found[node] = _fate(top, node, first, work)
    except (shell.ShellSyntaxError, _TooMuchError, RecursionError):
        return ()
    by_launcher = [fate for fate in found.values() if fate.launcher != "python"]
    # Of several Python programs nobody knows which one trains.
    alone = list(found.values())
    return tuple(by_launcher or (alone if all(fate.lost for fate in alone) or len(alone) == 1 else ()))


def _fate(top: shell.Simple, node: shell.ShellNode, succeeding: _ScriptRun, work: _Work) -> Fate:
    run = _ScriptRun(frozenset({node}), work)
    ends = [state for state in run.ends(top) if state.failed]
    if not ends:  # it runs only when those before it have failed
        run = _ScriptRun(frozenset(succeeding.started), work)
        ends = [state for state in run.ends(top) if state.failed]
    for other, started in run.started.items():
        succeeding.started.setdefault(other, started)
    name = succeeding.started[node].launcher
    alone = [state for state in ends if not _only_then(state, run, node, succeeding)]
    after = {run.started[other].launcher for state in ends for other in state.after}
    certain = all(state.status == FAILED for state in alone)
    replaced = bool(after - {"ddprun", "python"}) or len(alone) < len(ends)
    fate = Fate(name, shell=run.shell_of.get(node, ""), replaced=replaced, certain=certain)
    zero = [state for state in alone if state.status == "0"]
    if not zero or any(state.status == FAILED for state in ends):
        return fate
    how, at = zero[0].how
    return replace(fate, lost=how or "exit", at=at)


def _only_then(state: _State, run: _ScriptRun, node: shell.ShellNode, succeeding: _ScriptRun) -> bool:
    """True if another launcher ran on this path because the first had failed: `torchrun a.py || torchrun b.py`."""
    files = succeeding.started[node].files
    others = {n for n in state.after if (node, n) not in succeeding.followed}
    return any(run.started[n].launcher != "python" or run.started[n].files == files for n in others)


class _ScriptRun:
    """One run in thought, in which the launchers `failing` fail."""

    def __init__(self, failing: frozenset[shell.ShellNode], work: _Work) -> None:
        self.failing = failing
        self._work = work
        self.started: dict[shell.ShellNode, command.Command] = {}
        self.followed: set[tuple[shell.ShellNode, shell.ShellNode]] = set()
        """Launchers, and those that have run after them on the same path."""
        self.shell_of: dict[shell.ShellNode, str] = {}
        self._pipes = 0
        """How many pipes of several commands are around the present one."""
        self._by_type: dict[type, Callable[..., _Ends]] = {
            shell.ShellScript: self._script, shell.AndOr: self._and_or, shell.Pipeline: self._pipeline,
            shell.Background: self._background, shell.GroupNode: self._group, shell.If: self._if,
            shell.Loop: self._loop, shell.Case: self._case, shell.Function: self._function, shell.Simple: self._simple,
        }  # fmt: skip
        self._builtins: dict[str, Callable[[list[str], shell.Simple, _State, bool], _Ends]] = {
            "exit": self._exit, "return": self._exit, "break": self._leave, "continue": self._leave,
            "set": self._set, "trap": self._trap, "wait": self._wait, "eval": self._eval, "kill": self._kill,
            "setsid": self._setsid, **dict.fromkeys(("script", "su", "runuser", "flock"), self._script_program),
        }  # fmt: skip

    def ends(self, top: shell.Simple) -> list[_State]:
        """The states in which the command may end."""
        return [state for state, _ in self._simple(top, _State(), False)]

    def run(self, node: shell.ShellNode, state: _State, tested: bool) -> _Ends:
        """Run a command. tested: whether `set -e` ignores its failure."""
        self._work.take(STEP_WORK + state.size)
        return _distinct(self._by_type[type(node)](node, state, tested))

    # ---- how commands are joined ---------------------------------------------------------------------------

    def _script(self, node: shell.ShellScript, state: _State, tested: bool) -> _Ends:
        now: _Ends = [(state, "")]
        for part in node.parts:
            now = _distinct(_then(now, functools.partial(self._next, part, tested)))
        return now

    def _next(self, part: shell.ShellNode, tested: bool, state: _State) -> _Ends:
        is_kept = isinstance(part, shell.Simple) and not part.words  # rc=$?
        if state.status == FAILED and not is_kept:
            state = state.lost("next", _short(part.text))
        return self.run(part, state, tested)

    def _and_or(self, node: shell.AndOr, state: _State, tested: bool) -> _Ends:
        now = self.run(node.first, state, True if node.rest else tested)
        for number, (operator, other) in enumerate(node.rest, 1):
            is_tested = tested or number < len(node.rest)
            now = _then(now, functools.partial(self._other, operator, other, is_tested))
        return now

    def _other(self, operator: str, node: shell.ShellNode, tested: bool, state: _State) -> _Ends:
        wanted = "0" if operator == "&&" else FAILED
        ends: _Ends = [] if state.status == wanted else [(state, "")]
        if state.status in (wanted, ""):
            goes_on = replace(state, status=wanted)
            if operator == "||" and state.status == FAILED:
                goes_on = goes_on.lost("or", _short(f"|| {node.text}"))
            ends += self.run(node, goes_on, tested)
        return ends

    def _pipeline(self, node: shell.Pipeline, state: _State, tested: bool) -> _Ends:
        if len(node.parts) == 1:
            return _then(self.run(node.parts[0], state, True), _inverted)
        now: list[tuple[_State, tuple[str, ...]]] = [(state, ())]
        tested = tested or node.negated
        self._pipes += 1
        for part in node.parts:
            now = [(end, (*codes, end.status)) for before, codes in now for end in self._apart(part, before, tested)]
        self._pipes -= 1
        ends: _Ends = []
        for end, codes in now:
            codes = (*codes[:-1], "0") if _is_filter(node.parts[-1]) else codes
            status = next((code for code in codes if code != "0"), "0") if end.pipefail else codes[-1]
            if status == "0" and FAILED in codes[:-1]:
                rest = [part.text for part in node.parts[codes.index(FAILED) + 1 :]]
                end = end.lost("pipe", _short("".join(f" | {text}" for text in rest).strip()))
            end = replace(end, status=status, pipe=codes)
            ends += _inverted(end) if node.negated else self._checked(end, tested)
        return ends

    def _background(self, node: shell.Background, state: _State, _tested: bool) -> _Ends:
        ends: _Ends = []
        for end in self._apart(node.body, state, True):
            variables = {**state.variables, "!": f"job {len(state.jobs)}"}
            later = replace(end, status="0", jobs=(*state.jobs, end.status), variables=variables)
            ends.append((later.lost("background", "&"), ""))
        return ends

    def _apart(self, node: shell.ShellNode, state: _State, tested: bool) -> list[_State]:
        """The states after a subshell: of what it does only its status, and what has run in it, is left."""
        inside = replace(state, traps={}, jobs=())
        return [_merged(state, end) for last, _ in self.run(node, inside, tested) for end in self._trapped(last)]

    def _trapped(self, state: _State) -> list[_State]:
        """The states after a shell's EXIT trap."""
        text = state.traps.get("EXIT")
        if not text:
            return [state]
        ends = []
        for end, flow in self.run(self._work.parse(text), replace(state, traps={}, trapped=state.status), False):
            status = end.status if flow == "exit" else state.status
            if state.status == FAILED and status == "0":
                end = replace(end, how=("trap", _short(f"trap '{text}' EXIT")))
            ends.append(replace(end, status=status))
        return ends

    def _checked(self, state: _State, tested: bool) -> _Ends:
        """What follows from the failure of a command: `set -e`, and a trap for it."""
        if state.status != FAILED or tested:
            return [(state, "")]
        ends: _Ends = [(state, "")]
        if text := state.traps.get("ERR"):
            calm = replace(state, traps={**state.traps, "ERR": ""})
            ends = self.run(self._work.parse(text), calm, True)
            ends = [(end if flow else replace(end, status=FAILED, traps=state.traps), flow) for end, flow in ends]
        return [(end, flow or ("exit" if state.errexit else "")) for end, flow in ends]

    # ---- compound commands ---------------------------------------------------------------------------------

    def _group(self, node: shell.GroupNode, state: _State, tested: bool) -> _Ends:
        ends: _Ends = []
        for before in self._beside(node, state):
            if not node.subshell:
                ends += self.run(node.body, before, tested)
            else:
                ends += [one for end in self._apart(node.body, before, tested) for one in self._checked(end, tested)]
        return ends

    def _if(self, node: shell.If, state: _State, tested: bool) -> _Ends:
        ends: _Ends = []
        now = self._beside(node, state)
        for condition, body in node.branches:
            others: list[_State] = []
            for before in now:
                for end, flow in self.run(condition, before, True):
                    if flow:
                        ends.append((end, flow))
                        continue
                    if end.status in ("0", ""):
                        ends += self.run(body, replace(end, status="0"), tested)
                    if end.status in (FAILED, ""):
                        others.append(end.lost("if", "if") if end.status else end)
            now = others
        for end in now:
            ends += self.run(node.otherwise, end, tested) if node.otherwise else [(replace(end, status="0"), "")]
        return ends

    def _loop(self, node: shell.Loop, state: _State, tested: bool) -> _Ends:
        ends: _Ends = []
        now = [(before, "0") for before in self._beside(node, state)]
        may_leave = node.condition is None and not len(node.over) >= 2
        for turn in range(2):
            entering: list[_State] = []
            for before, last in now:
                found, left = self._turn(node, before, last)
                entering += found
                ends += left
            now = []
            for before in entering:
                before = replace(before, variables={k: v for k, v in before.variables.items() if k != node.name})
                for end, flow in self.run(node.body, before, tested):
                    if flow in ("", "continue"):
                        now.append((end, end.status))
                    else:
                        ends.append((replace(end, status="0"), "") if flow == "break" else (end, flow))
            if node.condition is None and (turn or may_leave):
                ends += [(replace(end, status=last), "") for end, last in now]
            if len(now) + len(ends) > PATHS_MAX:
                raise _TooMuchError
        return ends

    def _turn(self, node: shell.Loop, state: _State, last: str) -> tuple[list[_State], _Ends]:
        """The states in which the body begins, and those after the loop. last: status of the body."""
        if node.condition is None:
            return [state], []
        inside: list[_State] = []
        after: _Ends = []
        goes_on = "0" if node.kind == "while" else FAILED
        for end, flow in self.run(node.condition, state, True):
            if flow:
                after.append((end, flow))
                continue
            if end.status in (goes_on, ""):
                inside.append(end)
            if end.status != goes_on:
                left = end.lost("if", node.kind) if end.status == FAILED else end
                after.append((replace(left, status=last), ""))
        return inside, after

    def _case(self, node: shell.Case, state: _State, tested: bool) -> _Ends:
        ends: _Ends = []
        for before in self._beside(node, state):
            value = _value(node.word.value, before)
            is_left = True
            for patterns, body in node.branches:
                matches = [_matches(value, pattern) for pattern in patterns]
                if is_left and any(match is not False for match in matches):
                    ends += self.run(body, replace(before, status="0"), tested)
                is_left = is_left and True not in matches
            ends += [(replace(before, status="0"), "")] if is_left else []
        return ends

    def _function(self, node: shell.Function, state: _State, _tested: bool) -> _Ends:
        return [(replace(state, status="0", functions={**state.functions, node.name: node.body}), "")]

    def _beside(self, node: shell.ShellNode, state: _State) -> list[_State]:
        """The states after the scripts in the words of a command, and in <( ) and >( )."""
        now = [state]
        for word in shell.words_of(node):
            for inner, is_beside in (*((s, False) for s in word.runs), *((s, True) for s in word.beside)):
                now = [end for before in now for end in self._apart(inner, before, is_beside)]
                now = [end.lost("words", "<( )") if is_beside and end.status == FAILED else end for end in now]
        return now

    # ---- simple commands -----------------------------------------------------------------------------------

    def _simple(self, node: shell.Simple, state: _State, tested: bool) -> _Ends:
        has_runs = any(word.runs for word in shell.words_of(node))
        ends: _Ends = []
        for before in self._beside(node, state):
            words = self._expanded(node, state)
            own = before.status if has_runs else "0"
            before = replace(before, status=state.status)
            if not words or (len(words) == 1 and words[0].startswith(("$(", "`")) and has_runs):
                done: _Ends = [(_assigned(((n, word.value) for n, word in node.assigned), before, own, node.text), "")]
            else:
                if has_runs and own == FAILED and before.failed and not state.failed:
                    before = before.lost("words", _short(node.text))
                done = self._program(words, node, before, tested)
            for end, flow in done:
                ends += [(end, flow)] if flow else self._checked(replace(end, pipe=(end.status,)), tested)
        return ends

    def _expanded(self, node: shell.Simple, state: _State) -> list[str]:
        """The words with the variables that are known."""

        def known(found: re.Match[str]) -> str:
            value = _known(found, state)
            self._work.take(len(value))
            return value

        words: list[str] = []
        for word in node.words:
            if word.value in ("$@", "$*", "${@}"):
                self._work.take(sum(map(len, state.arguments), len(state.arguments)))
                words += state.arguments
                continue
            value = _VARIABLE.sub(known, word.value)
            is_split = not word.quoted or _ALL_OF_ARRAY.fullmatch(word.value)
            words += value.split() if value != word.value and is_split else [value]
        return words

    def _program(self, words: list[str], node: shell.Simple, state: _State, tested: bool) -> _Ends:
        while words[0] in ("exec", "command", "builtin", "nohup", "time", "env") and len(words) > 1:
            has_options = words[1].startswith("-")
            if has_options and words[0] == "command":
                return [(replace(state, status=""), "")]  # command -v torchrun
            if has_options:
                break
            words = words[1:]
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                words = words[1:]
            if not words:
                return [(replace(state, status="0"), "")]
        name = programs.name(words[0])
        if name in state.functions:
            ends = self.run(state.functions[name], replace(state, arguments=tuple(words[1:])), tested)
            return [(replace(end, arguments=state.arguments), "" if flow == "return" else flow) for end, flow in ends]
        if name in self._builtins:
            return self._builtins[name](words, node, state, tested)
        return self._other_program(name, words, node, state, tested)

    def _other_program(self, name: str, words: list[str], node: shell.Simple, state: _State, tested: bool) -> _Ends:
        place = next((i for i in programs.places(words) if programs.name(words[i]) in command.SHELLS), None)
        if place is not None:
            return self._shell(words[place:], node, state)
        if (text := state.variables.get(_file(words[0]))) is not None:
            return self._shell(["sh", "-c", text, *words], node, state)
        if name in ("cat", "tee") and node.document:
            written = {_file(word.value): node.document[-1] for word in (*node.targets, *node.words[1:])}
            return [(replace(state, status="0", variables={**state.variables, **written}), "")]
        begin = 0 if name not in ("find", "xargs") else next((i for i in range(len(words)) if _starts(words[i:])), 0)
        if (started := _starts(words[begin:])) is not None:
            end = self._launched(node, started, state)
            hides = name == "find" and ";" in words[begin:]
            return [(replace(end.lost("find", "find -exec … ;"), status="0") if hides else end, "")]
        if name in _DECLARES:
            named = (word.partition("=") for word in words[1:])
            return [(_assigned(((n, text) for n, has_value, text in named if has_value), state), "")]
        if name in ("pushd", "popd"):
            stack = state.variables.get("", "")
            fails = name == "popd" and not stack
            stack = f"{stack}/" if name == "pushd" else stack[1:]
            return [(replace(state, status=FAILED if fails else "0", variables={**state.variables, "": stack}), "")]
        if name == "false" or name in _NEVER_FAIL:
            return [(replace(state, status=FAILED if name == "false" else "0"), "")]
        # `ls model.pt || exit 1`: the file is there only if the training has written it.
        looks = name in _LOOKS_AT_FILES and any(not word.startswith("-") for word in words[1:])
        exits = name in _AWKS and any("exit" in word for word in words)
        is_test = name in _TESTS or looks or exits or (tested and not self._pipes)
        return [(replace(state, status=_tested(words, state) if is_test else "0"), "")]

    def _launched(self, node: shell.Simple, started: command.Command, state: _State) -> _State:
        self.started[node] = started
        self.shell_of[node] = state.program
        self.followed |= {(before, node) for before in state.ran}
        ran = state.ran | {node}
        if node in self.failing:
            return replace(state, status=FAILED, failed=True, ran=ran, after=frozenset(), how=("", ""))
        return replace(state, status="0", ran=ran, after=state.after | {node} if state.failed else state.after)

    def _shell(self, words: list[str], node: shell.Simple, state: _State) -> _Ends:
        """Another shell with its own options."""
        options, text, arguments = shell_call(words)
        file = next((word for word in words[1:] if not word.startswith("-")), "")
        if text is None:
            text = node.document[-1] if node.document else state.variables.get(_file(file))
        if text is None:
            return [(replace(state, status="0"), "")]  # a file, of which nothing is known
        inside = replace(
            state,
            status="0",
            errexit="e" in options or "errexit" in options,
            pipefail="pipefail" in options,
            functions={},
            arguments=tuple(arguments),
            program=programs.name(words[0]),
        )
        ends = self._apart(self._work.parse(text), inside, False)
        return [(_merged(state, end), "") for end in ends]

    # ---- builtins ------------------------------------------------------------------------------------------

    def _exit(self, words: list[str], node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        status = state.trapped if state.trapped and words[0] == "exit" else state.status
        if len(words) > 1:
            value = _value(words[1], state)
            status = "" if value is None else "0" if value == "0" else FAILED
        if status == "0" and state.failed and words[1:2] == ["0"]:
            state = replace(state, how=("exit", _short(node.text)))
        return [(replace(state, status=status), words[0])]

    def _leave(self, words: list[str], _node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        return [(replace(state, status="0"), words[0])]

    def _set(self, words: list[str], _node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        errexit, pipefail = state.errexit, state.pipefail
        for i, word in enumerate(words[1:], 1):
            if word.startswith(("-", "+")) and len(word) > 1:
                errexit = word[0] == "-" if "e" in word else errexit
                name = words[i + 1] if "o" in word and len(words) > i + 1 else ""
                errexit = word[0] == "-" if name == "errexit" else errexit
                pipefail = word[0] == "-" if name == "pipefail" else pipefail
        return [(replace(state, status="0", errexit=errexit, pipefail=pipefail), "")]

    def _trap(self, words: list[str], _node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        rest = [word for word in words[1:] if word != "--"]
        text, names = (rest[0], rest[1:]) if len(rest) > 1 else ("-", rest)
        text = "" if text == "-" else text
        known = {"0": "EXIT"}
        return [(replace(state, status="0", traps={**state.traps, **{known.get(n, n): text for n in names}}), "")]

    def _wait(self, words: list[str], _node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        named = [word for word in words[1:] if word != "-f"]
        if not named:
            if FAILED in state.jobs:
                state = replace(state, how=("wait", "wait"))
            return [(replace(state, status="0", jobs=()), "")]
        value = _value(named[-1], state)
        number = int(value[4:]) if value is not None and re.fullmatch(r"job \d+", value) else None
        known = state.jobs[number : number + 1] if number is not None else state.jobs
        status = FAILED if FAILED in known else "0"
        if status == "0" and FAILED in state.jobs:
            state = replace(state, how=("background", "&"))
        return [(replace(state, status=status), "")]

    def _eval(self, words: list[str], _node: shell.Simple, state: _State, tested: bool) -> _Ends:
        return self.run(self._work.parse(" ".join(words[1:])), state, tested)

    def _kill(self, words: list[str], _node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        """`kill $$` ends the shell with another code than 0, but not the first process of a container."""
        values = [_value(word, state) or "" for word in words[1:]]
        is_of_job = any(value.startswith("job ") for value in values)
        if "-0" in words or is_of_job:  # does the process live? A launcher that has failed does not.
            return [(replace(state, status=""), "")]
        if any(value.startswith("%") for value in values) and not state.jobs:
            return [(replace(state, status=FAILED), "")]
        ends_all = [(replace(state, status=FAILED), "exit")] if {"$$", "0", "-$$"} & {*words[1:]} else []
        return [*ends_all, (replace(state, status="0"), "")]

    def _setsid(self, words: list[str], node: shell.Simple, state: _State, tested: bool) -> _Ends:
        """setsid(1) forks if it leads a process group, as the first process of a container does, and ends with 0."""
        rest = [*itertools.dropwhile(lambda word: word.startswith("-"), words[1:])]
        options = words[1 : len(words) - len(rest)]
        forks = not state.program or node.words[0].value == "exec" or any("f" in option for option in options)
        ends = self._program(rest, node, state, tested) if rest else [(state, "")]
        if not forks or any("w" in option for option in options):
            return ends
        return [(replace(end.lost("setsid", "setsid"), status="0"), flow) for end, flow in ends]

    def _script_program(self, words: list[str], node: shell.Simple, state: _State, _tested: bool) -> _Ends:
        """script -c "command", su -c "command": a shell of its own."""
        at = next((i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*c|--command", word)), None)
        if at is None or at + 1 >= len(words):
            return self._other_program(words[0], words, node, state, False)
        hands_over = words[0] != "script" or any(re.fullmatch(r"-[a-z]*e[a-z]*|--return", word) for word in words)
        ends = self._shell(["sh", "-c", words[at + 1]], node, state)
        if hands_over:
            return ends
        return [(replace(end.lost("program", "script"), status="0"), flow) for end, flow in ends]


def _then(ends: _Ends, following: Callable[[_State], _Ends]) -> _Ends:
    """The ends of what follows where the flow goes on, and the others as they are."""
    return [end for state, flow in ends for end in ([(state, flow)] if flow else following(state))]


def _distinct(ends: _Ends) -> _Ends:
    """Those between which something differs. Raises _TooMuchError."""
    different = list({(state.key, flow): (state, flow) for state, flow in ends}.values())
    if len(different) > PATHS_MAX:
        raise _TooMuchError
    return different


def _inverted(state: _State) -> _Ends:
    """What ! makes of an end."""
    state = state.lost("not", "!") if state.status == FAILED else state
    return [(replace(state, status=_negated(state.status, True)), "")]


def _is_filter(part: shell.ShellNode) -> bool:
    """True for `grep -v warning` at the end of a pipe: it shows the output of the ranks, and ends with 0 if there is
    any. `grep -q done` is a test."""
    words = [word.value for word in part.words] if isinstance(part, shell.Simple) else []
    is_quiet = any(re.match(r"-[a-zA-Z]*[qcl]|--(?:quiet|silent|count)", word) for word in words)
    return words[:1] != [] and words[0] in _FILTERS and not is_quiet


def _merged(outside: _State, end: _State) -> _State:
    """The state of a shell after one within it has ended so."""
    return replace(outside, status=end.status, failed=end.failed, ran=end.ran, after=end.after, how=end.how)


def shell_call(words: list[str]) -> tuple[set[str], str | None, list[str]]:
    """The options of a shell's call (their letters, and names after -o), its script after -c, and what follows."""
    options: set[str] = set()
    rest = iter(words[1:])
    others: list[str] = []
    for word in rest:
        if word == "--" or not word.startswith(("-", "+")) or len(word) == 1:
            others = [*([] if word == "--" else [word]), *rest]
            break
        if word.startswith("--"):
            continue
        options |= set(word[1:]) if word[0] == "-" else set()
        if word.endswith("o"):
            options |= {next(rest, "")}
    return options, others[0] if "c" in options and others else None, others[2:]


def _file(name: str) -> str:
    """The variable for the text of a file that the script writes."""
    return f"file {name.removeprefix('./')}"


def _starts(words: list[str]) -> command.Command | None:
    """The training that a simple command starts."""
    found = command.read(words) if words else command.Command()
    return found if found.launcher and (found.launcher != "python" or found.files) else None


def _known(found: re.Match[str], state: _State) -> str:
    name = found[1] or found[2]
    value = state.variables.get(name or "", "")
    return value if name and value and value != FAILED and not value.startswith("job ") else found[0]


def _assigned(named: Iterable[tuple[str, str]], state: _State, status: str = "0", command_text: str = "") -> _State:
    """NAME=value, and ARRAY+=(value) where the command says so."""
    variables = dict(state.variables)
    for name, text in named:
        value = _value(text, state)
        before = variables.get(name, "") if f"{name}+=(" in command_text else ""
        variables[name] = f"{before} {text if value is None else value}".lstrip()
    return replace(state, status=status, variables=variables)


def _value(text: str, state: _State) -> str | None:
    """The text of a word; None where nobody can know it."""
    if found := _PIPESTATUS.match(text):
        number = int(found[1] or 0)
        return (state.pipe[number] or None) if number < len(state.pipe) else None
    if inner := re.fullmatch(r"\$\(\(\s*(\w+)\s*\)\)", text):
        text = f"${inner[1]}"
    elif inner := re.fullmatch(r"\$\(\(\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*\)\)", text):
        return str(_CALCULATES[inner[2]](int(inner[1]), int(inner[3])))
    elif (inner := re.fullmatch(r"\$\(\((.*)\)\)", text)) and (found := _ARITHMETIC.match(inner[1])):
        return {"0": "1", FAILED: "0"}.get(_tested(["((", inner[1]], state)) if found[1] or found[3] else None
    found = _VARIABLE.fullmatch(text)
    if found is None:
        return None if "$" in text or "`" in text else text
    if found[3] or found[4]:
        return state.status or None
    value = state.variables.get(found[1] or found[2] or "!")
    return None if value is None or ("$" in value or "`" in value) else value


def _tested(words: list[str], state: _State) -> str:
    """The status of a test: of exit codes it is known, else nobody can know it."""
    if words[0] == "((" and len(words) > 1:
        found = _ARITHMETIC.match(words[1])
        if found is None:
            return "" if re.search(r"[=!<>]=|[<>&|]", words[1]) else "0"
        name = found[2] if found[2].startswith("$") else f"${found[2]}"
        inside = [name, found[3] or "!=", found[4] or "0"]
        return _negated(_compared(inside, state), found[1] == "!")
    if words[0] not in ("[", "[[", "test"):
        return ""
    return _joined([word for word in words[1:] if word not in ("]", "]]")], state)


def _joined(words: list[str], state: _State) -> str:
    """The status of tests that are joined by -o, -a, || and &&."""
    for joins, deciding, otherwise in _JOINS if len(words) <= _TEST_WORDS_MAX else ():
        if place := next((i for i, word in enumerate(words) if word in joins), 0):
            parts = {_joined(words[:place], state), _joined(words[place + 1 :], state)}
            return deciding if deciding in parts else otherwise if parts == {otherwise} else ""
    is_negated = words[:1] == ["!"]
    return _negated(_compared(words[is_negated:], state), is_negated)


def _negated(status: str, is_negated: bool) -> str:
    return {"0": FAILED, FAILED: "0"}.get(status, "") if is_negated else status


def _compared(words: list[str], state: _State) -> str:
    if len(words) != 3 or words[1] not in _COMPARED:
        return ""
    left, right, compare = _value(words[0], state), _value(words[2], state), _COMPARED[words[1]]
    if left == FAILED and right == "0":  # an exit code that is not 0 is more than 0
        return "0" if compare(1, 0) else FAILED
    if left is None or right is None or FAILED in (left, right):
        return ""
    if left.isdecimal() and right.isdecimal():
        return "0" if compare(int(left), int(right)) else FAILED
    if compare not in (op.eq, op.ne):
        return ""
    return "0" if compare(left, right) else FAILED


def _matches(value: str | None, pattern: str) -> bool | None:
    if pattern == "*":
        return True
    if value is None or re.search(r"[*?\[$]", pattern) or (value == FAILED and pattern != "0"):
        return None
    return value == pattern


def _short(text: str) -> str:
    line = " ".join(text.split(None, _TEXT_MAX))
    return line if len(line) <= _TEXT_MAX else f"{line[: _TEXT_MAX - 2]} …"

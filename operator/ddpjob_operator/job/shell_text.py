"""Find the variables that a pod's own shell reads in a script of `sh -c`: quotes, here-documents, nested shells.

A shell that a launcher starts runs in each rank, with the variables of the ranks, so its script is not read here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddpjob_operator.job import launcher, programs

_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"\{[!#]?([A-Za-z_]\w*)(:?[-=+?])?")
_IN_TEXT = re.compile(r"\$\{?([A-Za-z_]\w*)")
_IN_NUMBERS = re.compile(r"(?<![\w.])([A-Za-z_]\w*)")
_HERE = re.compile(r"<<-?[ \t]*(?:(?P<quote>['\"])(?P<quoted>[^'\"\n]+)(?P=quote)|(?P<plain>\\?[^\s;&|<>()'\"]+))")
# What other programs read of the environment: Python, printenv, [ -v NAME ].
_BY_NAME = re.compile(r"(?:environ\W{1,6}(?:get\W{1,3})?|getenv\W{1,3}|\bprintenv\s+|(?<=\s)-v\s+)([A-Za-z_]\w*)\b")
_OPTION_C = re.compile(r"-[a-z]*c[a-z]*")
_RESERVED = set("! { do elif else if then until while".split())
_CODE_FOLLOWS = ("eval", "trap")
_DEPTH_MAX = 50  # of commands in commands: what is deeper is not read


@dataclass(frozen=True, order=True)
class Reference:
    """One variable that is read; `begin` and `end` delimit its name in the text."""

    begin: int
    end: int
    name: str
    operator: str = ""
    """The `:-` of ${NAME:-0}."""
    by_shell: bool = True
    """False for a text that another program may read: a quoted here-document, Python's os.environ["NAME"]."""


@dataclass
class _Command:
    """State of the command that is being read: it decides which of its words are scripts."""

    word: str | None = None
    is_code: bool = False
    """True if the present word is a script."""
    is_launched: bool = False
    has_shell: bool = False
    is_first: bool = True
    is_eval: bool = False
    previous: str = ""

    @property
    def is_read(self) -> bool:
        """True if a shell of the pod reads the present word as a script."""
        return self.is_code and not self.is_launched

    def add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def reset(self) -> None:
        """Begin the next command."""
        vars(self).update(vars(_Command()))

    def end_word(self) -> None:
        """Begin the next word."""
        word, self.word = self.word, None
        if word is None:
            return
        if not self.is_code:
            self._see(word)
        else:
            self.is_code = self.is_eval
        self.is_first, self.previous = self.is_first and word in _RESERVED, word

    def _see(self, word: str) -> None:
        name = programs.name(word)
        if name in launcher.SHELLS:
            self.has_shell = True
        elif self.has_shell and _OPTION_C.fullmatch(word):
            self.is_code = True
        elif self.has_shell and not word.startswith(("-", "+")) and not self.previous.endswith("o"):
            self.has_shell = False  # the file that it runs; `bash -o pipefail -c` goes on
        elif _starts_ranks(word):
            self.is_launched = True
        elif self.is_first and word in _CODE_FOLLOWS:
            self.is_code, self.is_eval = True, word == "eval"


def _starts_ranks(word: str) -> bool:
    name = programs.name(word)
    return (
        name in launcher.LAUNCHERS
        or name in programs.FRAMEWORKS
        or word in launcher.MODULES
        or word == "ddprun"
        or launcher.LAUNCHER_FILE.search(word) is not None
    )


def scripts(words: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """Yield the index of each word that is a shell's script, and True if a shell of the pod reads it."""
    command = _Command()
    for place, word in enumerate(words):
        if command.is_code:
            yield place, not command.is_launched
        command.add(word)
        command.end_word()


@functools.lru_cache(maxsize=16)
def references(script: str) -> tuple[Reference, ...]:
    """Return the variables that the pod's own shell reads when it runs the script, in their order."""
    # Cached, because each rule about variables needs it.
    reader = _Reader(script)
    reader.commands(0, len(script))
    found = {ref.begin: ref for ref in reader.found}
    for match in _BY_NAME.finditer(script):
        found.setdefault(match.start(1), Reference(match.start(1), match.end(1), match[1], by_shell=False))
    return tuple(sorted(found.values()))


def set_at(script: str, name: str) -> int | None:
    """Return the position at which a script first sets a variable, on any path through it; None if it never does."""
    given = rf"(?<![\w$-]){name}=|\bfor\s+{name}\s|\bread\s[^;&|\n]*\b{name}\b|\$\{{{name}:?="
    found = re.search(given, script)
    return None if found is None else found.start()


@dataclass
class _Reader:
    """Reader of a shell's script from left to right; each method gets a position and returns the next one."""

    text: str
    found: list[Reference] = field(default_factory=list)
    waiting: list[tuple[str, bool, bool, bool]] = field(default_factory=list)
    """Here-documents that begin with the next line: delimiter, whether tabs go before it, is quoted, is for a shell."""
    depth: int = 0

    def commands(self, i: int, end: int, closing: str = "") -> int:
        """Read commands up to `end`, or to `closing`."""
        command = _Command()
        self.depth += 1
        while i < end and self.depth <= _DEPTH_MAX and self.text[i] != closing:
            i = self._step(i, end, command)
        self.depth -= 1
        return min(i + 1, end) if closing else end

    def _step(self, i: int, end: int, command: _Command) -> int:
        c = self.text[i]
        if c in " \t":
            command.end_word()
            return i + 1
        if c in ";&|\n":
            command.end_word()
            command.reset()
            return self._here_documents(i + 1, end) if c == "\n" else i + 1
        if c == "#" and command.word is None:
            line_end = self.text.find("\n", i, end)
            return end if line_end < 0 else line_end
        if c == "\\":
            command.add(self.text[i + 1 : i + 2].strip("\n"))
            return i + 2
        return self._in_word(i, end, command)

    def _in_word(self, i: int, end: int, command: _Command) -> int:
        c = self.text[i]
        if c == "<" and self.text.startswith("<<", i):
            return self._less(i, command)
        if c == "(":
            is_arithmetic = self.text.startswith("((", i) and command.word is None
            return self._numbers(i + 2, end) if is_arithmetic else self.commands(i + 1, end, ")")
        begin = i
        if c == "'":
            i = self._single(i, end, command)
        elif c == '"':
            i = self._double(i, end, command.is_read)
        elif c == "$":
            i = self._dollar(i, end)
        elif c == "`":
            i = self.commands(i + 1, end, "`")
        else:
            command.add(c)
            return i + 1
        command.add(self.text[begin:i].strip("'\""))
        return i

    def _single(self, i: int, end: int, command: _Command) -> int:
        close = self.text.find("'", i + 1, end)
        close = end if close < 0 else close
        if command.is_read:
            self.commands(i + 1, close)
        return min(close + 1, end)

    def _double(self, i: int, end: int, is_code: bool) -> int:
        i += 1
        while i < end and self.text[i] != '"':
            i = self._quoted(i, end, is_code)
        return min(i + 1, end)

    def _quoted(self, i: int, end: int, is_code: bool) -> int:
        r"""Read one step in double quotes or a here-document. is_code: a nested shell expands \$NAME later."""
        c = self.text[i]
        if c == "\\":
            if is_code and self.text.startswith("$", i + 1):
                return self._dollar(i + 1, end, is_quoted=True)
            return i + 2
        if c == "$":
            return self._dollar(i, end, is_quoted=True)
        return self.commands(i + 1, end, "`") if c == "`" else i + 1

    def _dollar(self, i: int, end: int, *, is_quoted: bool = False) -> int:
        text, after = self.text, i + 1
        if text.startswith("((", after):
            return self._numbers(after + 2, end)
        if text.startswith("(", after):
            return self.commands(after + 1, end, ")")
        if text.startswith("{", after):
            return self._braces(after, end)
        if text.startswith("'", after) and not is_quoted:
            close = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(text, after + 1, end)
            return close.end() if close else end
        if name := _NAME.match(text, after, end):
            self._add(name.start(), name[0])
            return name.end()
        return after

    def _braces(self, i: int, end: int) -> int:
        """Read ${NAME…}, and the variables in its default."""
        match = _BRACED.match(self.text, i, end)
        if match:
            self._add(match.start(1), match[1], match[2] or "")
        i = match.end() if match else i + 1
        self.depth += 1
        while i < end and self.depth <= _DEPTH_MAX and self.text[i] != "}":
            c = self.text[i]
            i = self._double(i, end, is_code=False) if c == '"' else self._quoted(i, end, is_code=False)
        self.depth -= 1
        return min(i + 1, end)

    def _numbers(self, i: int, end: int) -> int:
        """Read ((…)), in which names need no $."""
        close = self.text.find("))", i, end)
        close = end if close < 0 else close
        for match in _IN_NUMBERS.finditer(self.text, i, close):
            self._add(match.start(1), match[1])
        return min(close + 2, end)

    def _less(self, i: int, command: _Command) -> int:
        match = None if self.text.startswith("<<<", i) else _HERE.match(self.text, i)
        if match is None:
            return i + 3 if self.text.startswith("<<<", i) else i + 2
        command.end_word()
        plain = match["plain"] or ""
        is_quoted = bool(match["quote"]) or plain.startswith("\\")
        for_shell = command.has_shell and not command.is_launched
        self.waiting.append((match["quoted"] or plain.lstrip("\\"), match[0][2] == "-", is_quoted, for_shell))
        return match.end()

    def _here_documents(self, i: int, end: int) -> int:
        waiting, self.waiting = self.waiting, []
        for delimiter, has_tabs, is_quoted, for_shell in waiting:
            last = re.compile(rf"^{chr(9) + '*' if has_tabs else ''}{re.escape(delimiter)}$", re.MULTILINE)
            match = last.search(self.text, i, end)
            close, after = (match.start(), match.end()) if match else (end, end)
            self._here_document(i, close, is_quoted, for_shell)
            i = min(after + 1, end)
        return i

    def _here_document(self, i: int, close: int, is_quoted: bool, for_shell: bool) -> None:
        if is_quoted and for_shell:
            self.commands(i, close)
        elif is_quoted:
            for match in _IN_TEXT.finditer(self.text, i, close):
                self.found.append(Reference(match.start(1), match.end(1), match[1], by_shell=False))
        else:
            while i < close:
                i = self._quoted(i, close, for_shell)

    def _add(self, begin: int, name: str, operator: str = "") -> None:
        self.found.append(Reference(begin, begin + len(name), name, operator))

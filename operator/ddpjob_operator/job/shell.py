"""Reads a shell's script: its commands, how they are joined, and what stands in their words.

The grammar of POSIX, with what bash adds and such scripts use: `[[ ]]`, `(( ))`, `|&`, `&>`, `<( )`, `function`.
Nothing is expanded. What cannot be read raises ShellSyntaxError, and whoever asks then says nothing about the script.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SCRIPT_MAX = 20_480
"""Characters that are read, by the operator's event loop."""
WORK_MAX = 3_200
"""Words, commands and lists of commands that are read, each up to 15 µs. A script of backquotes has one a character."""
DEPTH_MAX = 40
_BLANKS = " \t\r"
_ENDS_WORD = set(" \t\r\n;&|()<>")
_REDIRECT = re.compile(r"(?:\d{1,3}|\{\w+\})?(?:<<<|<<-|<<|&>>|&>|>>|>\||<>|>&|<&|[<>](?!\())")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]{0,100}\])?\+?=")
_NAME = re.compile(r"[^\s;&|()<>\"'\\$`]+")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")
_EXPANSION = re.compile(r"\$(?:[A-Za-z_]|\{|\(\()")
_RESERVED = frozenset(
    "if then elif else fi while until for select do done case esac in function { } ! [[ time coproc".split()
)
_OPENS = frozenset("if while until for case { [[ function".split())


class ShellSyntaxError(ValueError):
    """The script cannot be read."""


@dataclass(frozen=True, eq=False)
class Word:
    """A word: `value` without quotes, with its expansions as they are written; and the scripts that it runs."""

    value: str
    quoted: bool = False
    """True if a part of it is quoted."""
    runs: tuple[ShellScript, ...] = ()
    """The scripts in $( ) and backquotes."""
    beside: tuple[ShellScript, ...] = ()
    """The scripts in <( ) and >( ), which run beside the command."""
    expanded: tuple[str, ...] = ()
    """The expansions of variables as they are written: $NAME, ${NAME:-0}, $((NAME + 1))."""


@dataclass(frozen=True, eq=False)
class ShellNode:
    """A command of any kind. text: as it is written."""

    text: str = field(default="", kw_only=True)


@dataclass(frozen=True, eq=False)
class Simple(ShellNode):
    """NAME=value program word … <<END"""

    assigned: tuple[tuple[str, Word], ...] = ()
    words: tuple[Word, ...] = ()
    targets: tuple[Word, ...] = ()
    """Of its redirections."""
    document: list[str] = field(default_factory=list)
    """The text of a here-document or a <<< word, where it has one; the last counts."""
    expanded: list[str] = field(default_factory=list)
    """The documents in which the shell expands variables."""


@dataclass(frozen=True, eq=False)
class Pipeline(ShellNode):
    """! one | other"""

    parts: tuple[ShellNode, ...]
    negated: bool = False


@dataclass(frozen=True, eq=False)
class AndOr(ShellNode):
    """first && other || other"""

    first: ShellNode
    rest: tuple[tuple[str, ShellNode], ...]


@dataclass(frozen=True, eq=False)
class Background(ShellNode):
    """command &"""

    body: ShellNode


@dataclass(frozen=True, eq=False)
class ShellScript(ShellNode):
    """one; other"""

    parts: tuple[ShellNode, ...]


@dataclass(frozen=True, eq=False)
class GroupNode(ShellNode):
    """{ list; }, or ( list ) where it is a subshell."""

    body: ShellNode
    subshell: bool = False
    targets: tuple[Word, ...] = ()


@dataclass(frozen=True, eq=False)
class If(ShellNode):
    """if list; then list; … else list; fi"""

    branches: tuple[tuple[ShellNode, ShellNode], ...]
    otherwise: ShellNode | None
    targets: tuple[Word, ...] = ()


@dataclass(frozen=True, eq=False)
class Loop(ShellNode):
    """while, until, and for (then without a condition)."""

    kind: str
    condition: ShellNode | None
    body: ShellNode
    over: tuple[Word, ...] = ()
    name: str = ""
    targets: tuple[Word, ...] = ()


@dataclass(frozen=True, eq=False)
class Case(ShellNode):
    """case word in pattern) list;; esac"""

    word: Word
    branches: tuple[tuple[tuple[str, ...], ShellNode], ...]
    targets: tuple[Word, ...] = ()


@dataclass(frozen=True, eq=False)
class Function(ShellNode):
    """name() command"""

    name: str
    body: ShellNode


def parse(script: str) -> ShellScript:
    """The commands of a script. The same text gives the same objects. Raises ShellSyntaxError."""
    found = read(script)
    if isinstance(found, str):
        raise ShellSyntaxError(found)
    return found


@functools.lru_cache(maxsize=256)
def read(script: str) -> ShellScript | str:
    """The commands of a script, or why it cannot be read: that is asked again and again, too."""
    if len(script) > SCRIPT_MAX:
        return "too long"
    reader = _Reader(script)
    try:
        found = reader.sequence(frozenset())
    except (IndexError, RecursionError):
        return "it ends too early"
    except ShellSyntaxError as error:
        return str(error)
    return found if reader.at == len(script) else f"unexpected {script[reader.at : reader.at + 10]!r}"


def children(node: ShellNode) -> Iterator[ShellNode]:
    """The commands directly below a command, those in its words included."""
    parts = [*_parts(tuple(vars(node).values()))]
    for part in parts:
        if isinstance(part, Word):
            yield from (*part.runs, *part.beside)
    yield from (part for part in parts if isinstance(part, ShellNode))


def words_of(node: ShellNode) -> tuple[Word, ...]:
    """The words of a command itself, those of its redirections included."""
    return tuple(part for part in _parts(tuple(vars(node).values())) if isinstance(part, Word))


def _parts(value: object) -> Iterator[ShellNode | Word]:
    """The commands and words in the fields of a command, in their order."""
    if isinstance(value, (ShellNode, Word)):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one)


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a script, without the variables that are set before it."""
    for node in walk(parse(script)):
        if isinstance(node, Simple) and node.words:
            yield [word.value for word in node.words]


def walk(node: ShellNode) -> Iterator[ShellNode]:
    """A command and all below it, in the order in which they are written."""
    yield node
    for child in children(node):
        yield from walk(child)


class _Reader:
    """One pass over the text; `at` is the place of the next character."""

    def __init__(self, text: str, outer: _Reader | None = None, at: int = 0) -> None:
        self._depth: int = outer._depth + 1 if outer else 0
        if self._depth > DEPTH_MAX:
            raise ShellSyntaxError("too deep")
        self.text, self.at = text, at
        self._work: Iterator[int] = outer._work if outer else iter(range(WORK_MAX))
        self._documents: list[tuple[Word, bool, list[str], list[str]]] = []  # here-documents whose text follows

    def _count(self) -> None:
        if next(self._work, None) is None:
            raise ShellSyntaxError("too many commands")

    # ---- lists ---------------------------------------------------------------------------------------------

    def sequence(self, ends: frozenset[str]) -> ShellScript:
        """Commands up to one of these words, a closing bracket, `;;` or the end."""
        self._count()
        begin, parts = self._skip_lines(), []
        while not self._ends(ends):
            node = self._and_or()
            self._skip()
            if self._operator("&") is not None:
                node = Background(node, text=node.text)
            elif not self._peek(";;", ";&"):
                self._operator(";")
            parts.append(node)
            self._skip_lines()
        return ShellScript(tuple(parts), text=self.text[begin : self.at])

    def _ends(self, ends: frozenset[str]) -> bool:
        if self.at >= len(self.text) or self.text[self.at] in ")" or self._peek(";;", ";&"):
            return True
        return bool(ends) and self._reserved() in ends

    def _and_or(self) -> ShellNode:
        begin = self.at
        first, rest = self._pipeline(), []
        while (operator := self._operator("&&", "||")) is not None:
            self._skip_lines()
            rest.append((operator, self._pipeline()))
        return AndOr(first, tuple(rest), text=self._from(begin)) if rest else first

    def _pipeline(self) -> ShellNode:
        begin, negated, timed = self._skip(), False, False
        while (word := self._reserved()) in ("!", "time"):
            negated ^= word == "!"
            timed |= word == "time"
            self._take(word)
            if word == "time" and self.text.startswith("-p ", self.at):
                self.at += 3
                self._skip()
        parts = [self._command()]
        while self._skip() <= len(self.text) and not self._peek("||") and self._operator("|&", "|") is not None:
            self._skip_lines()
            parts.append(self._command())
        if len(parts) == 1 and not negated:
            return GroupNode(parts[0], text=self._from(begin)) if timed else parts[0]
        return Pipeline(tuple(parts), negated, text=self._from(begin))

    # ---- commands ------------------------------------------------------------------------------------------

    def _command(self) -> ShellNode:
        self._count()
        begin, word = self._skip(), self._reserved()
        if self._peek("(("):
            inside = self._skip_brackets("((", "))")
            words = (Word("(("), Word(inside, expanded=(f"(({inside}",)), Word("))"))
            return Simple(words=words, text=self._from(begin))
        if self._peek("("):
            self.at += 1
            body = self.sequence(frozenset())
            self._expect(")")
            return GroupNode(body, True, self._targets(), text=self._from(begin))
        if word in _OPENS:
            compound: dict[str, Callable[[int], ShellNode]] = {
                "if": self._if, "while": self._while, "until": self._while, "for": self._for, "case": self._case,
                "{": self._group, "[[": self._test, "function": self._function,
            }  # fmt: skip
            return compound[word](begin)
        if word in _RESERVED - {"in", "time", "!"} and word != "coproc":
            raise ShellSyntaxError(f"unexpected {word}")
        if word == "coproc":
            self._take(word)
            return Background(self._command(), text=self._from(begin))
        return self._simple(begin)

    def _if(self, begin: int) -> ShellNode:
        branches, otherwise = [], None
        self._take("if")
        while True:
            condition = self.sequence(frozenset({"then"}))
            self._take("then")
            branches.append((condition, self.sequence(frozenset({"elif", "else", "fi"}))))
            if self._reserved() != "elif":
                break
            self._take("elif")
        if self._reserved() == "else":
            self._take("else")
            otherwise = self.sequence(frozenset({"fi"}))
        self._take("fi")
        return If(tuple(branches), otherwise, self._targets(), text=self._from(begin))

    def _while(self, begin: int) -> ShellNode:
        kind = self._reserved()
        self._take(kind)
        condition = self.sequence(frozenset({"do"}))
        return Loop(kind, condition, self._do(), targets=self._targets(), text=self._from(begin))

    def _for(self, begin: int) -> ShellNode:
        self._take(self._reserved())
        name, over = "", []
        if self._peek("(("):
            self._skip_brackets("((", "))")
        else:
            name = self._word().value
            self._skip_lines()
            if self._reserved() == "in":
                self._take("in")
                while self._skip() < len(self.text) and self.text[self.at] not in ";\n":
                    over.append(self._word())
        self._operator(";")
        self._skip_lines()
        return Loop("for", None, self._do(), tuple(over), name, self._targets(), text=self._from(begin))

    def _do(self) -> ShellNode:
        opens, closes = ("{", "}") if self._reserved() == "{" else ("do", "done")
        self._take(opens)
        body = self.sequence(frozenset({closes}))
        self._take(closes)
        return body

    def _case(self, begin: int) -> ShellNode:
        self._take("case")
        self._skip()
        word, branches = self._word(), []
        self._skip_lines()
        self._take("in")
        self._skip_lines()
        while self._reserved() != "esac":
            self._operator("(")
            patterns: list[str] = []
            while not patterns or self._operator("|") is not None:
                self._skip()
                patterns.append(self._word().value)
            self._expect(")")
            branches.append((tuple(patterns), self.sequence(frozenset({"esac"}))))
            self._operator(";;&", ";;", ";&")
            self._skip_lines()
        self._take("esac")
        return Case(word, tuple(branches), self._targets(), text=self._from(begin))

    def _group(self, begin: int) -> ShellNode:
        self._take("{")
        body = self.sequence(frozenset({"}"}))
        self._take("}")
        return GroupNode(body, False, self._targets(), text=self._from(begin))

    def _test(self, begin: int) -> ShellNode:
        self._count()
        end = re.compile(r"\s\]\](?=[\s;&|)]|$)").search(self.text, self.at)
        if end is None:
            raise ShellSyntaxError("[[ has no end")
        words = self.text[self.at : end.end()].split()
        self.at = end.end()
        plain = tuple(Word(word.strip("\"'"), expanded=() if word[0] == "'" else (word,)) for word in words)
        return Simple(words=plain, text=self._from(begin))

    def _function(self, begin: int) -> ShellNode:
        self._take("function")
        name = self._word().value
        self._skip()
        if self._operator("(") is not None:
            self._expect(")")
        self._skip_lines()
        return Function(name, self._command(), text=self._from(begin))

    def _simple(self, begin: int) -> ShellNode:
        assigned: list[tuple[str, Word]] = []
        words: list[Word] = []
        targets: list[Word] = []
        document: list[str] = []
        expanded: list[str] = []
        while self._skip() < len(self.text):
            if (found := _REDIRECT.match(self.text, self.at)) is not None:
                self._redirect(found[0], targets, document, expanded)
                continue
            if self.text[self.at] in "\n;&|)" or (self.text[self.at] == "(" and not words):
                break
            if self.text[self.at] == "(":
                return self._function_of(words, begin)
            named = _ASSIGNMENT.match(self.text, self.at) if not words else None
            if named is not None:
                self.at = named.end()
                assigned.append((named[1], self._value()))
            else:
                words.append(self._word())
        if not (assigned or words or targets):
            raise ShellSyntaxError(f"no command at {self.text[self.at : self.at + 10]!r}")
        # A here-document is read at the end of the line.
        return Simple(tuple(assigned), tuple(words), tuple(targets), document, expanded, text=self._from(begin))

    def _value(self) -> Word:
        """Of an assignment; an array's is unknown."""
        if self.text.startswith("(", self.at):
            return Word(self._skip_brackets("(", ")"))
        return Word("") if self._at_end_of_word() else self._word()

    def _function_of(self, words: list[Word], begin: int) -> ShellNode:
        self._expect("(")
        self._skip()
        self._expect(")")
        if len(words) != 1:
            raise ShellSyntaxError("a bracket within a command")
        self._skip_lines()
        return Function(words[0].value, self._command(), text=self._from(begin))

    # ---- redirections --------------------------------------------------------------------------------------

    def _targets(self) -> tuple[Word, ...]:
        targets: list[Word] = []
        while self._skip() < len(self.text) and (found := _REDIRECT.match(self.text, self.at)) is not None:
            self._redirect(found[0], targets, [], [])
        return tuple(targets)

    def _redirect(self, operator: str, targets: list[Word], document: list[str], expanded: list[str]) -> None:
        self.at += len(operator)
        kind = operator.lstrip("0123456789")
        self._skip()
        word = self._word()
        if kind in ("<<", "<<-"):
            self._documents.append((word, kind == "<<-", document, expanded))
        elif kind == "<<<":
            document.append(word.value)
            expanded += word.expanded
        else:
            targets.append(word)

    def _read_documents(self) -> None:
        """The lines of the here-documents that began in the line before."""
        for end, is_indented, document, expanded in self._documents:
            lines: list[str] = []
            while self.at < len(self.text):
                line_end = self.text.find("\n", self.at)
                line_end = len(self.text) if line_end < 0 else line_end
                line, self.at = self.text[self.at : line_end], min(len(self.text), line_end + 1)
                line = line.lstrip("\t") if is_indented else line
                if line == end.value:
                    break
                lines.append(line)
            document.append("\n".join(lines))
            if not end.quoted:
                expanded.append(document[-1])
        self._documents = []

    # ---- words ---------------------------------------------------------------------------------------------

    def _word(self) -> Word:
        self._count()
        value: list[str] = []
        runs: list[ShellScript] = []
        beside: list[ShellScript] = []
        expanded: list[str] = []
        begin, quoted = self.at, False
        while not self._at_end_of_word() or self._peek("<(", ">("):
            character = self.text[self.at]
            if character == "'":
                end = self.text.find("'", self.at + 1)
                end = end if end > 0 else self._unclosed("'")
                value.append(self.text[self.at + 1 : end])
                self.at, quoted = end + 1, True
            elif character == '"':
                self._double_quoted(value, runs, expanded)
                quoted = True
            elif character == "\\":
                value.append(self.text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at, quoted = self.at + 2, True
            elif character in "<>":
                self.at += 2
                beside.append(self._inner(value))
            else:
                self._part(value, runs, expanded)
        if self.at == begin:
            raise ShellSyntaxError(f"no word at {self.text[begin : begin + 10]!r}")
        return Word("".join(value), quoted, tuple(runs), tuple(beside), tuple(expanded))

    def _double_quoted(self, value: list[str], runs: list[ShellScript], expanded: list[str]) -> None:
        self.at += 1
        while self.text[self.at : self.at + 1] != '"':
            if self.at >= len(self.text):
                self._unclosed('"')
            character = self.text[self.at]
            if character == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                value.append(following.replace("\n", "") if following in '$`"\\\n' else character + following)
                self.at += 2
            else:
                self._part(value, runs, expanded)
        self.at += 1

    def _part(self, value: list[str], runs: list[ShellScript], expanded: list[str]) -> None:
        """Characters, or an expansion."""
        begin = self.at
        if self.text.startswith("$((", begin):
            self.at += 1
            self._skip_brackets("((", "))")
        elif self.text.startswith("$(", begin):
            self.at += 2
            runs.append(self._inner(None))
        elif self.text.startswith("${", begin):
            self.at += 1
            self._skip_brackets("{", "}")
        elif self.text[begin] == "`":
            runs.append(self._backquoted())
        elif (variable := _VARIABLE.match(self.text, begin)) is not None:
            self.at = variable.end()
        else:
            plain = _NAME.match(self.text, begin)
            self.at = plain.end() if plain and self.text[begin] != "$" else begin + 1
        value.append(self.text[begin : self.at])
        if _EXPANSION.match(self.text, begin):
            expanded.append(value[-1])

    def _inner(self, value: list[str] | None) -> ShellScript:
        """The script up to the closing bracket."""
        begin = self.at
        inner = _Reader(self.text, self, begin)
        found = inner.sequence(frozenset())
        self.at = inner.at
        self._expect(")")
        if value is not None:
            value.append(f"({self.text[begin : self.at]}")
        return found

    def _backquoted(self) -> ShellScript:
        end = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.at + 1)
        if end is None:
            raise ShellSyntaxError("` is not closed")
        self.at = end.end()
        inner = _Reader(re.sub(r"\\([`$\\])", r"\1", end[0][:-1]), self)
        return inner.sequence(frozenset())

    def _skip_brackets(self, opens: str, closes: str) -> str:
        """What is between brackets, which may hold further ones and quotes."""
        self._count()
        begin, depth = self.at, 0
        if not self.text.startswith(opens, begin):
            raise ShellSyntaxError(f"no {opens}")
        while True:
            if self.at >= len(self.text):
                self._unclosed(opens)
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif character in "'\"" and opens != "((":
                end = self.text.find(character, self.at + 1)
                self.at = end if end > 0 else self._unclosed(character)
            depth += (character == opens[0]) - (character == closes[0])
            self.at += 1
            if not depth:
                return self.text[begin + len(opens) : self.at - len(closes)]

    def _unclosed(self, what: str) -> int:
        raise ShellSyntaxError(f"{what} is not closed")

    # ---- characters ----------------------------------------------------------------------------------------

    def _at_end_of_word(self) -> bool:
        return self.at >= len(self.text) or self.text[self.at] in _ENDS_WORD

    def _skip(self) -> int:
        """Over blanks, lines that go on, and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in _BLANKS:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                break
        return self.at

    def _skip_lines(self) -> int:
        """Over blanks and ends of lines, with the here-documents behind those."""
        while self._skip() < len(self.text) and self.text[self.at] == "\n":
            self.at += 1
            self._read_documents()
        return self.at

    def _peek(self, *operators: str) -> bool:
        return any(self.text.startswith(operator, self.at) for operator in operators)

    def _operator(self, *operators: str) -> str | None:
        self._skip()
        found = next((operator for operator in operators if self.text.startswith(operator, self.at)), None)
        if found is not None:
            self.at += len(found)
        return found

    def _expect(self, operator: str) -> None:
        if self._operator(operator) is None:
            raise ShellSyntaxError(f"no {operator}")

    def _reserved(self) -> str:
        """The word here, if it is one of the shell's own."""
        self._skip()
        found = _NAME.match(self.text, self.at)
        if found is None or found[0] not in _RESERVED:
            return ""
        return found[0] if found.end() >= len(self.text) or self.text[found.end()] in _ENDS_WORD else ""

    def _take(self, word: str) -> None:
        if not word or self._reserved() != word:
            raise ShellSyntaxError(f"no {word}")
        self.at += len(word)
        self._skip()

    def _from(self, begin: int) -> str:
        return self.text[begin : self.at].strip()

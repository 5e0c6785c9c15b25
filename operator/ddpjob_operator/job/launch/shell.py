"""Parser for shell scripts: POSIX grammar, and the bash extensions `[[ ]]`, `(( ))`, `|&`, `&>`, `<( )` and `function`.
It expands nothing, and raises ShellSyntaxError for a script that it cannot read; callers then give no warning about it.
https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html#tag_19_10"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from msgspec import Struct, field
from msgspec.structs import replace

SCRIPT_MAX = 20_480  # characters of a script that are parsed; the operator's event loop does the parsing
WORK_MAX = 3_200
"""The most words, commands and lists that are parsed, up to 15 µs each. Backquotes can make one per character."""
DEPTH_MAX = 40
_BLANKS = " \t\r"
_ENDS_WORD = set(" \t\r\n;&|()<>")
_REDIRECT = re.compile(r"(?:\d{1,3}|\{\w+\})?(?:<<<|<<-|<<|&>>|&>|>>|>\||<>|>&|<&|[<>](?!\())")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]{0,100}\])?\+?=")
_NAME = re.compile(r"[^\s;&|()<>\"'\\$`]+")
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")
_EXPANSION = re.compile(r"\$(?:[A-Za-z_]|\{|\(\()")
_BACKQUOTED = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL)
_END_OF_TEST = re.compile(r"\s\]\](?=[\s;&|)]|$)")
_RESERVED = frozenset(
    "if then elif else fi while until for select do done case esac in function { } ! [[ time coproc".split()
)
_CANNOT_BEGIN = frozenset("then elif else fi select do done esac }".split())


class ShellSyntaxError(ValueError):
    """The script cannot be parsed."""


class Word(Struct, frozen=True, eq=False):
    """A word without its quotes, and with its expansions as they are written."""

    value: str
    quoted: bool = False
    runs: tuple[ShellScript, ...] = ()
    """Command substitutions: $( ) and backquotes."""
    beside: tuple[ShellScript, ...] = ()
    """Process substitutions: <( ) and >( )."""
    expanded: tuple[str, ...] = ()
    """Variable and arithmetic expansions as they are written: $NAME, ${NAME:-0}, $((NAME + 1))."""


class ShellNode(Struct, frozen=True, eq=False, kw_only=True):
    """A command of any kind, with its source text."""

    text: str = ""
    targets: tuple[Word, ...] = ()


class Simple(ShellNode, frozen=True, eq=False):
    """A simple command: NAME=value program word … <<END"""

    assigned: tuple[tuple[str, Word], ...] = ()
    words: tuple[Word, ...] = ()
    document: list[str] = field(default_factory=list)
    """The command's here-documents and <<< words. The last one is the command's standard input."""
    expanded: list[str] = field(default_factory=list)
    """The here-documents and <<< words in which the shell expands variables."""


class Pipeline(ShellNode, frozen=True, eq=False):
    """A pipeline, perhaps negated: ! one | other"""

    parts: tuple[ShellNode, ...]
    negated: bool = False


class AndOr(ShellNode, frozen=True, eq=False):
    """Commands joined by && and ||."""

    first: ShellNode
    rest: tuple[tuple[str, ShellNode], ...]


class Background(ShellNode, frozen=True, eq=False):
    """A background job: command &"""

    body: ShellNode


class ShellScript(ShellNode, frozen=True, eq=False):
    """Commands one after the other: one; other"""

    parts: tuple[ShellNode, ...]


class GroupNode(ShellNode, frozen=True, eq=False):
    """A group of commands: { list; }, or the subshell ( list )."""

    body: ShellNode
    subshell: bool = False


class If(ShellNode, frozen=True, eq=False):
    """A condition: if list; then list; … else list; fi"""

    branches: tuple[tuple[ShellNode, ShellNode], ...]
    otherwise: ShellNode | None


class Loop(ShellNode, frozen=True, eq=False):
    """A loop by while, until or for; a for loop has no condition."""

    kind: str
    condition: ShellNode | None
    body: ShellNode
    over: tuple[Word, ...] = ()
    name: str = ""


class Case(ShellNode, frozen=True, eq=False):
    """A choice: case word in pattern) list;; esac"""

    word: Word
    branches: tuple[tuple[tuple[str, ...], ShellNode], ...]


class Function(ShellNode, frozen=True, eq=False):
    """A function: name() command"""

    name: str
    body: ShellNode


def parse(script: str) -> ShellScript:
    """Return the tree of a script, the same objects for the same text. Raise ShellSyntaxError."""
    found = read(script)
    if isinstance(found, str):
        raise ShellSyntaxError(found)
    return found


@functools.lru_cache(maxsize=256)
def read(script: str) -> ShellScript | str:
    """Return the tree of a script, or why the script cannot be parsed, because lru_cache does not cache exceptions."""
    if len(script) > SCRIPT_MAX:
        return "too long"
    parser = _ShellParser(script)
    try:
        found = parser.sequence()
    except (IndexError, RecursionError):
        return "it ends too early"
    except ShellSyntaxError as error:
        return str(error)
    return found if parser.at == len(script) else f"unexpected {script[parser.at : parser.at + 10]!r}"


def children(node: ShellNode) -> Iterator[ShellNode]:
    """Yield the commands directly inside a command, first the `$(…)` in its words."""
    parts = _parts_of(node)
    for part in parts:
        if isinstance(part, Word):
            yield from (*part.runs, *part.beside)
    yield from (part for part in parts if isinstance(part, ShellNode))


def words_of(node: ShellNode) -> tuple[Word, ...]:
    """Return the words of the command itself, including the words of its redirections."""
    return tuple(part for part in _parts_of(node) if isinstance(part, Word))


def values(node: ShellNode) -> list[str]:
    """Return the texts of the words of a simple command, without assignments; [] for any other command."""
    return [word.value for word in node.words] if isinstance(node, Simple) else []


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command of a script, without the variables that are set before it."""
    yield from filter(None, map(values, walk(parse(script))))


def walk(node: ShellNode) -> Iterator[ShellNode]:
    """Yield a command and all commands below it, in the order of the script."""
    yield node
    for child in children(node):
        yield from walk(child)


def _parts_of(node: ShellNode) -> list[ShellNode | Word]:
    """Return the commands and words of a command in the order of their expansion: redirections come last."""
    before = tuple(getattr(node, name) for name in node.__struct_fields__ if name != "targets")
    return [*_parts(before), *node.targets]


def _parts(value: object) -> Iterator[ShellNode | Word]:
    if isinstance(value, (ShellNode, Word)):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one)


def _joined(parts: list[Word]) -> Word:
    if len(parts) == 1:
        return parts[0]
    runs = tuple(script for part in parts for script in part.runs)
    beside = tuple(script for part in parts for script in part.beside)
    expanded = tuple(text for part in parts for text in part.expanded)
    return Word("".join(part.value for part in parts), any(part.quoted for part in parts), runs, beside, expanded)


class _Redirections(Struct, frozen=True):
    targets: list[Word] = field(default_factory=list)
    document: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)


class _ShellParser:
    """One pass over the text; `at` is the index of the next character."""

    def __init__(self, text: str, outer: _ShellParser | None = None, at: int = 0) -> None:
        self._depth: int = outer._depth + 1 if outer else 0
        if self._depth > DEPTH_MAX:
            raise ShellSyntaxError("too deep")
        self.text, self.at = text, at
        self._work: Iterator[int] = outer._work if outer else iter(range(WORK_MAX))
        self._documents: list[tuple[Word, bool, _Redirections]] = []
        """Here-documents that begin after the current line: delimiter, whether tabs are removed, command."""
        self._compounds: dict[str, Callable[[], ShellNode]] = {
            "if": self._if, "while": self._while, "until": self._while, "for": self._for, "case": self._case,
            "{": lambda: GroupNode(self._block("{", "}")), "(": self._subshell,
        }  # fmt: skip
        self._others: dict[str, Callable[[], ShellNode]] = {
            "[[": self._test, "((": self._arithmetic, "function": self._function, "coproc": self._coproc,
        }  # fmt: skip

    def _count(self) -> None:
        if next(self._work, None) is None:
            raise ShellSyntaxError("too many commands")

    def sequence(self, *ends: str) -> ShellScript:
        """Parse commands until one of these words, a closing bracket, `;;` or the end of the text."""
        self._count()
        begin, parts = self._skip_lines(), []
        while not self._is_end(ends):
            node = self._and_or()
            if self._operator("&"):
                node = Background(node, text=node.text)
            elif not self._peek(";;", ";&"):
                self._operator(";")
            parts.append(node)
            self._skip_lines()
        return ShellScript(tuple(parts), text=self.text[begin : self.at])

    def _is_end(self, ends: tuple[str, ...]) -> bool:
        return self.at >= len(self.text) or self._peek(")", ";;", ";&") or (bool(ends) and self._reserved() in ends)

    def _and_or(self) -> ShellNode:
        begin = self.at
        first, rest = self._pipeline(), []
        while operator := self._operator("&&", "||"):
            self._skip_lines()
            rest.append((operator, self._pipeline()))
        return AndOr(first, tuple(rest), text=self._since(begin)) if rest else first

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
        while not self._peek("||") and self._operator("|&", "|"):
            self._skip_lines()
            parts.append(self._command())
        if len(parts) == 1 and not negated:
            return GroupNode(parts[0], text=self._since(begin)) if timed else parts[0]
        return Pipeline(tuple(parts), negated, text=self._since(begin))

    def _command(self) -> ShellNode:
        self._count()
        begin, word = self._skip(), self._reserved()
        word = word or next((opens for opens in ("((", "(") if self._peek(opens)), "")
        if word in _CANNOT_BEGIN:
            raise ShellSyntaxError(f"unexpected {word}")
        if word in self._compounds:
            node = self._compounds[word]()
            return replace(node, targets=tuple(self._redirections().targets), text=self._since(begin))
        return replace(self._others.get(word, self._simple)(), text=self._since(begin))

    def _subshell(self) -> ShellNode:
        self._expect("(")
        body = self.sequence()
        self._expect(")")
        return GroupNode(body, subshell=True)

    def _if(self) -> ShellNode:
        branches, otherwise = [], None
        while (word := self._reserved()) in ("if", "elif"):
            condition = self._block(word, "then")
            branches.append((condition, self.sequence("elif", "else", "fi")))
        if word == "else":
            self._take("else")
            otherwise = self.sequence("fi")
        self._take("fi")
        return If(tuple(branches), otherwise)

    def _while(self) -> ShellNode:
        kind = self._reserved()
        self._take(kind)
        return Loop(kind, self.sequence("do"), self._do())

    def _for(self) -> ShellNode:
        self._take("for")
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
        return Loop("for", None, self._do(), tuple(over), name)

    def _do(self) -> ShellScript:
        return self._block("{", "}") if self._reserved() == "{" else self._block("do", "done")

    def _block(self, opens: str, closes: str) -> ShellScript:
        self._take(opens)
        body = self.sequence(closes)
        self._take(closes)
        return body

    def _case(self) -> ShellNode:
        self._take("case")
        word, branches = self._word(), []
        self._skip_lines()
        self._take("in")
        self._skip_lines()
        while self._reserved() != "esac":
            self._operator("(")
            patterns: list[str] = []
            while not patterns or self._operator("|"):
                self._skip()
                patterns.append(self._word().value)
            self._expect(")")
            branches.append((tuple(patterns), self.sequence("esac")))
            self._operator(";;&", ";;", ";&")
            self._skip_lines()
        self._take("esac")
        return Case(word, tuple(branches))

    def _test(self) -> ShellNode:
        self._count()
        end = _END_OF_TEST.search(self.text, self.at)
        if end is None:
            raise ShellSyntaxError("[[ has no end")
        words = self.text[self.at : end.end()].split()
        self.at = end.end()
        return Simple(words=tuple(Word(w.strip("\"'"), expanded=() if w[0] == "'" else (w,)) for w in words))

    def _arithmetic(self) -> ShellNode:
        inside = self._skip_brackets("((", "))")
        return Simple(words=(Word("(("), Word(inside, expanded=(f"(({inside}",)), Word("))")))

    def _function(self) -> ShellNode:
        self._take("function")
        name = self._word().value
        if self._operator("("):
            self._expect(")")
        self._skip_lines()
        return Function(name, self._command())

    def _coproc(self) -> ShellNode:
        self._take("coproc")
        return Background(self._command())

    def _simple(self) -> ShellNode:
        assigned: list[tuple[str, Word]] = []
        words: list[Word] = []
        redirections = _Redirections()
        while self._redirections(redirections) and self.at < len(self.text):
            if self.text[self.at] == "(" and words:
                return self._function_named(words)
            if self.text[self.at] in "\n;&|()":
                break
            named = _ASSIGNMENT.match(self.text, self.at) if not words else None
            if named is not None:
                self.at = named.end()
                assigned.append((named[1], self._assigned()))
            else:
                words.append(self._word())
        if not (assigned or words or redirections.targets):
            raise ShellSyntaxError(f"no command at {self.text[self.at : self.at + 10]!r}")
        document, expanded = redirections.document, redirections.expanded  # here-document, read at the end of the line
        return Simple(tuple(assigned), tuple(words), document, expanded, targets=tuple(redirections.targets))

    def _assigned(self) -> Word:
        """Parse the value of an assignment; the value of an array becomes one word."""
        if self.text.startswith("(", self.at):
            return Word(self._skip_brackets("(", ")"))
        return Word("") if self._at_end_of_word() else self._word()

    def _function_named(self, words: list[Word]) -> ShellNode:
        self._expect("(")
        self._expect(")")
        if len(words) != 1:
            raise ShellSyntaxError("a bracket within a command")
        self._skip_lines()
        return Function(words[0].value, self._command())

    def _redirections(self, found: _Redirections | None = None) -> _Redirections:
        found = found or _Redirections()
        while self._skip() < len(self.text) and (operator := _REDIRECT.match(self.text, self.at)) is not None:
            self.at = operator.end()
            kind = operator[0].lstrip("0123456789")
            self._skip()
            word = self._word()
            if kind in ("<<", "<<-"):
                self._documents.append((word, kind == "<<-", found))
            elif kind == "<<<":
                found.document.append(word.value)
                found.expanded.extend(word.expanded)
            else:
                found.targets.append(word)
        return found

    def _read_documents(self) -> None:
        """Read the here-documents that began in the line before."""
        for end, is_indented, command in self._documents:
            lines: list[str] = []
            while self.at < len(self.text):
                line, _, _ = self.text[self.at :].partition("\n")
                self.at = min(len(self.text), self.at + len(line) + 1)
                line = line.lstrip("\t") if is_indented else line
                if line == end.value:
                    break
                lines.append(line)
            command.document.append("\n".join(lines))
            if not end.quoted:
                command.expanded.append(command.document[-1])
        self._documents = []

    def _word(self) -> Word:
        self._count()
        parts = []
        while not self._at_end_of_word() or self.text.startswith(("<(", ">("), self.at):
            parts.append(self._part_of_word())
        if not parts:
            raise ShellSyntaxError(f"no word at {self.text[self.at : self.at + 10]!r}")
        return _joined(parts)

    def _part_of_word(self) -> Word:
        begin, character = self.at, self.text[self.at]
        if character == "'":
            self.at = self._closing("'") + 1
            return Word(self.text[begin + 1 : self.at - 1], quoted=True)
        if character == "\\":
            self.at += 2
            return Word(self.text[begin + 1 : self.at].replace("\n", ""), quoted=True)
        if character in "<>":
            self.at += 1
            inner = self._substitution()
            return Word(self.text[begin + 1 : self.at], beside=(inner,))
        return self._double_quoted() if character == '"' else self._expansion()

    def _double_quoted(self) -> Word:
        self.at += 1
        parts = [Word("", quoted=True)]
        while not self.text.startswith('"', self.at):
            if self.at >= len(self.text):
                raise ShellSyntaxError('" is not closed')
            if self.text[self.at] == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                parts.append(Word(escaped.replace("\n", "") if escaped in '$`"\\\n' else f"\\{escaped}"))
                self.at += 2
            else:
                parts.append(self._expansion())
        self.at += 1
        return _joined(parts)

    def _expansion(self) -> Word:
        """Parse one expansion or a run of plain characters."""
        begin = self.at
        runs: tuple[ShellScript, ...] = ()
        if self.text.startswith("$((", begin):
            self.at += 1
            self._skip_brackets("((", "))")
        elif self.text.startswith("$(", begin):
            self.at += 1
            runs = (self._substitution(),)
        elif self.text.startswith("${", begin):
            self.at += 1
            self._skip_brackets("{", "}")
        elif self.text[begin] == "`":
            runs = (self._backquoted(),)
        else:
            plain = _VARIABLE.match(self.text, begin) or _NAME.match(self.text, begin)
            self.at = plain.end() if plain else begin + 1
        text = self.text[begin : self.at]
        return Word(text, runs=runs, expanded=(text,) if _EXPANSION.match(text) else ())

    def _substitution(self) -> ShellScript:
        """Parse `(script)`."""
        inner = _ShellParser(self.text, self, self.at + 1)
        found = inner.sequence()
        self.at = inner.at
        self._expect(")")
        return found

    def _backquoted(self) -> ShellScript:
        end = _BACKQUOTED.match(self.text, self.at + 1)
        if end is None:
            raise ShellSyntaxError("` is not closed")
        self.at = end.end()
        return _ShellParser(re.sub(r"\\([`$\\])", r"\1", end[0][:-1]), self).sequence()

    def _skip_brackets(self, opens: str, closes: str) -> str:
        """Return the text between brackets, which may contain further brackets and quotes."""
        self._count()
        begin, depth = self.at, 0
        if not self.text.startswith(opens, begin):
            raise ShellSyntaxError(f"no {opens}")
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif character in "'\"" and opens != "((":
                self.at = self._closing(character)
            depth += (character == opens[0]) - (character == closes[0])
            self.at += 1
            if not depth:
                return self.text[begin + len(opens) : self.at - len(closes)]
        raise ShellSyntaxError(f"{opens} is not closed")

    def _closing(self, quote: str) -> int:
        """Return the index of the quote that closes the quote at the current index."""
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise ShellSyntaxError(f"{quote} is not closed")
        return end

    def _at_end_of_word(self) -> bool:
        return self.at >= len(self.text) or self.text[self.at] in _ENDS_WORD

    def _skip(self) -> int:
        """Skip blanks, line continuations and a comment."""
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
        """Skip blanks and ends of lines, and read the here-documents that begin there."""
        while self._skip() < len(self.text) and self.text[self.at] == "\n":
            self.at += 1
            self._read_documents()
        return self.at

    def _peek(self, *operators: str) -> bool:
        return self.text.startswith(operators, self._skip())

    def _operator(self, *operators: str) -> str:
        """If one of these operators comes next, skip it and return it; else return ""."""
        self._skip()
        found = next((operator for operator in operators if self.text.startswith(operator, self.at)), "")
        self.at += len(found)
        return found

    def _expect(self, operator: str) -> None:
        if not self._operator(operator):
            raise ShellSyntaxError(f"no {operator}")

    def _reserved(self) -> str:
        """Return the next word if it is a reserved word; else ""."""
        found = _NAME.match(self.text, self._skip())
        if found is None or found[0] not in _RESERVED:
            return ""
        return found[0] if found.end() >= len(self.text) or self.text[found.end()] in _ENDS_WORD else ""

    def _take(self, word: str) -> None:
        if not word or self._reserved() != word:
            raise ShellSyntaxError(f"no {word}")
        self.at += len(word)
        self._skip()

    def _since(self, begin: int) -> str:
        return self.text[begin : self.at].strip()

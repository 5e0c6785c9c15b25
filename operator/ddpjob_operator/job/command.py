"""What a job's command starts: which script or module, with which arguments, and by which launcher.

The options of other frameworks' launchers are not known, so after them the first word that names a Python file is the
script.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddpjob_operator.job import launcher, programs

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*$")
# train.py --lr 0.1, --nnodes 2, -u train.py. `python -W "ignore …"` may have a space.
_JOINED = re.compile(r"\S+\.py\s+\S|--[\w-]+\s+\S|-[^\W\dWXc]\s+\S")
_MODULES = {
    "accelerate": "accelerate",
    "colossalai": "colossalai",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "horovod": "horovodrun",
    "lightning": "fabric",
    "lightning_fabric": "fabric",
}
# Modules that start what follows them, and change nothing about it.
_MODULE_WRAPPERS = set("cProfile coverage debugpy memory_profiler pdb profile scalene trace viztracer".split())
_INSTALLERS = {"ensurepip", "pip", "uv", "venv", "virtualenv"}


@dataclass(frozen=True)
class Command:
    """What is started; all of it may be missing."""

    launcher: str = ""
    """torchrun, accelerate, …; "python" where a script is started by itself."""
    script: str | None = None
    module: str | None = None
    """As in `python -m package.train`."""
    words: tuple[str, ...] = ()
    """What the script is given."""

    @property
    def named(self) -> tuple[str, ...]:
        """The script as the command names it, or -m and the module."""
        return (self.script,) if self.script is not None else ("-m", self.module) if self.module else ()

    @property
    def files(self) -> list[str]:
        """Where the code that is started may be."""
        if self.script is not None:
            return [self.script]
        path = (self.module or "").replace(".", "/")
        return [f"{path}.py", f"{path}/__main__.py"] if path else []


def read(words: list[str]) -> Command:
    """Of several commands the training: what a launcher starts, else the first Python file, else the first that starts
    Python. Those before it install packages and prepare data."""
    commands = [c for command in _commands(words) if (c := _read(command)).launcher]
    by_launcher = [c for c in commands if c.launcher != "python"]
    return next((c for c in by_launcher or commands if c.files), (by_launcher or commands or [Command()])[0])


def script_of(words: list[str]) -> str | None:
    """The Python file that a command starts, if no shell and no other program before it may change the folder."""
    is_plain = bool(words) and not is_shell(words) and programs.name(words[0]) not in programs.WRAPPERS
    script = read(words).script if is_plain else None
    return script if script is not None and script.endswith(".py") else None


def starts_nothing(words: list[str]) -> bool:
    """True if a command is a launcher that is given no script. Of a shell's own script this is not known."""
    begin = None if is_shell(words) else launcher.options_begin(words)
    if begin is None:
        return False
    options, rest = launcher.read_options(words[begin:])
    return not rest and not {"help", "h"} & set(options)


def is_shell(words: list[str]) -> bool:
    """True if a shell is started first, which may do more than to start the script."""
    return bool(words) and words[0].rsplit("/", 1)[-1] in launcher.SHELLS


def joined(words: list[str]) -> str:
    """The word that is several, so that nothing of its name can be started: `torchrun train.py`, `--nnodes 2`; "" if
    there is none. The arguments of the script are its own affair."""
    if words and _is_joined_program(words[0]):
        return words[0]
    begin = None if is_shell(words) else launcher.options_begin(words)
    if begin is not None:
        options, rest = launcher.split_options(words[begin:])
        own = [*(group[0] for _, group in options), *rest[:1]]
    else:
        place = next((i for i in programs.places(words) if _PYTHON.match(programs.name(words[i]))), len(words))
        following = words[place + 1 :]
        own = following[: len(following) - len(launcher.after_python_options(following)) + 1]
    return next((word for word in own if _JOINED.match(word)), "")


def _is_joined_program(word: str) -> bool:
    """True unless a path has a space in it: `/opt/my tools/python`."""
    first, *rest = word.split() or [""]
    if not rest or _is_known(programs.name(word.strip())):
        return False
    return "/" not in first or _is_known(programs.name(first)) or any(w.startswith("-") for w in rest)


def _is_known(program: str) -> bool:
    starts = program in (*launcher.LAUNCHERS, *launcher.SHELLS) or program in programs.FRAMEWORKS
    return starts or program in programs.WRAPPERS or _PYTHON.match(program) is not None


def _commands(words: list[str]) -> Iterator[list[str]]:
    """The command, or those of a shell's script, without the variables that are set before each."""
    script = launcher.shell_script(words)
    if script is None:
        yield words
        return
    yield from launcher.shell_commands(script)


def _read(words: list[str]) -> Command:
    program = programs.name(words[0]) if words else ""
    if _PYTHON.match(program):
        return _of_python(words[1:])
    if program in launcher.LAUNCHERS:
        return _of_torchrun(program, words[1:])
    if program in programs.FRAMEWORKS:
        return _of_framework(program, words[1:])
    if program in programs.WRAPPERS:
        return _behind("", words)
    return Command("python", words[0], words=tuple(words[1:])) if program.endswith(".py") else Command()


def _of_python(words: list[str]) -> Command:
    rest = launcher.after_python_options(words)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return _of_module(rest[1], rest[2:])
    if rest and launcher.LAUNCHER_FILE.search(rest[0]):
        return _of_torchrun(rest[0].rsplit("/", 1)[-1], rest[1:])
    if rest and _is_script(rest[0]):
        return Command("python", rest[0], words=tuple(rest[1:]))
    return Command("python")


def _is_script(word: str) -> bool:
    """True if Python reads a word as a script: train.py, or a file without a suffix as pip installs it."""
    return word.endswith(".py") or re.fullmatch(r"(?:[\w.@+-]*/)*[\w@+][\w@+-]*", word) is not None


def _of_module(module: str, rest: list[str]) -> Command:
    if module in launcher.MODULES:
        return _of_torchrun(module, rest)
    if module == "ddprun":
        return _of_torchrun("ddprun", rest)
    top = module.split(".")[0]
    if top in _INSTALLERS:
        return Command()
    if top in _MODULES:
        return _of_framework(_MODULES[top], rest)
    if top in _MODULE_WRAPPERS:
        return _behind("python", rest)
    return Command("python", module=module, words=tuple(rest))


def _of_torchrun(name: str, words: list[str]) -> Command:
    if programs.tells_of_itself(words):
        return Command()
    options, rest = launcher.read_options(words)
    if "no_python" in options and is_shell(rest):
        return replace(read(rest), launcher=name)
    if not rest or "no_python" in options:
        return replace(_behind(name, rest), launcher=name) if rest else Command(name)
    given = tuple(rest[2:] if rest[1:2] == ["--"] else rest[1:])  # the launcher takes it away
    if "module" in options:
        return Command(name, module=rest[0], words=given)
    return Command(name, rest[0] if _is_script(rest[0]) else None, words=given)


def _of_framework(program: str, words: list[str]) -> Command:
    rest = programs.launch_options([program, *words])
    return Command() if rest is None else _behind(program, rest)


def _behind(name: str, words: list[str]) -> Command:
    """What a launcher starts that has options which are not known here, or, without a name, a command with a wrapper
    before it."""
    places = range(len(words)) if name else itertools.islice(programs.places(words), 1, None)
    for i in places:
        word, program = words[i], programs.name(words[i])
        if _PYTHON.match(program) or program in launcher.LAUNCHERS or program in programs.FRAMEWORKS:
            inner = _read(words[i:])
            return replace(inner, launcher=name) if name and inner.launcher == "python" else inner
        if word in ("-m", "--module") and words[i + 1 : i + 2] and not words[i + 1].startswith("-"):
            return Command(name or "python", module=words[i + 1], words=tuple(words[i + 2 :]))
        if word.endswith(".py") and not word.startswith("-"):
            return Command(name or "python", word, words=tuple(words[i + 1 :]))
    return Command(name)

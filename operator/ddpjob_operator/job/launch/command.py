"""The one reader of a command: its launcher and options, the script or module it starts, and the script's arguments.
After a launcher whose options are not known, the first word that names a Python file is the script. ddprun parses its
own options (ddprun/options.py), because it runs in images without the operator."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ddpjob_operator.job import bounds
from ddpjob_operator.job.launch import programs, shell

LAUNCHERS = ("torchrun", "ddprun")
LAUNCHER_FILE = re.compile(r"torch/distributed/(run|launch)\.py$")
MODULES = {"torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher"}
SHELLS = ("sh", "bash", "dash", "zsh", "ash")
# torchrun's options that take no value (torch/distributed/run.py, 2.13).
_FLAGS = set("standalone module no_python run_path use_env virtual_local_rank help no_preload".split())
OPTIONS = (
    *_FLAGS,
    *(
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval start_method "
        "event_log_handler role log_dir redirects tee local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs numa_binding "
        "signals_to_handle shutdown_timeout preload"
    ).split(),
)
"""All options of torchrun, torch.distributed.launch and ddprun: argparse lets users abbreviate them."""
_OF_DDPRUN = {"preload", "no_preload"}
_OF_LAUNCH = {"use_env"}
_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
OPTIONS_MAX = 128  # options of a launcher that are read; torchrun has 35
SCRIPT_READ_MAX = 20_480
"""The most characters of a shell's script that are read: the operator's event loop reads it, at 2 µs each."""
_LAUNCHERS_MAX = 20  # launchers that are read in one command
WORDS_READ_MAX = 5_000
_SHELL_DEPTH_MAX = 10

PYTHON = re.compile(r"(?:python|pypy)[\d.]*$")
# Matches one word that should be several words: `train.py --lr 0.1`, `--nnodes 2`, `-u train.py`.
# A value such as `-W "ignore …"` may contain a space.
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
# Modules that start the program after them and change nothing about it.
_MODULE_WRAPPERS = set("cProfile coverage debugpy memory_profiler pdb profile scalene trace viztracer".split())
# Programs that print or look something up, and start nothing.
_PRINTERS = {"echo", "printf", "type", "which"}
_STARTS_OTHERS = {"exec", "env", "command", "nohup"}
_INSTALLERS = {"ensurepip", "pip", "uv", "venv", "virtualenv"}


class Command(Struct, frozen=True):
    launcher: str = ""
    """torchrun, accelerate, …; "python" if a script is started without a launcher."""
    script: str | None = None
    module: str | None = None
    """pkg.train of `python -m pkg.train`."""
    words: tuple[str, ...] = ()
    """The script's arguments."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of torchrun or ddprun by full name; "1" for a flag."""

    @property
    def has_torchrun_options(self) -> bool:
        return self.launcher in LAUNCHERS or self.launcher in MODULES

    @property
    def nodes(self) -> tuple[int, int]:
        """MIN and MAX of --nnodes."""
        return nodes_range(self.options.get("nnodes", ""))

    @property
    def named(self) -> tuple[str, ...]:
        """Return the script as the command names it, or -m and the module."""
        return (self.script,) if self.script is not None else ("-m", self.module) if self.module else ()

    @property
    def files(self) -> list[str]:
        """Return the files that may contain the started code."""
        if self.script is not None:
            return [self.script]
        path = (self.module or "").replace(".", "/")
        return [f"{path}.py", f"{path}/__main__.py"] if path else []


def nodes_range(text: str) -> tuple[int, int]:
    """Return MIN and MAX of a number of nodes for torchrun, equal for a single number; -1 for anything else."""
    first, _, last = text.partition(":")
    return bounds.count(first), bounds.count(last or first)


def read(words: list[str]) -> Command:
    """Return the training among several commands: the first that starts a launcher, else a Python file, else Python.
    Other commands install packages or prepare data."""
    try:
        commands = [c for command in _commands(words) if _names_few(command) and (c := _read(command)).launcher]
    except RecursionError:  # the command has hundreds of launchers that start each other
        return Command()
    by_launcher = [c for c in commands if c.launcher != "python"]
    return next((c for c in by_launcher or commands if c.files), (by_launcher or commands or [Command()])[0])


def _names_few(words: list[str]) -> bool:
    """False if a command names so many launchers that searching the words after each of them would take too long."""
    names = map(programs.name, words)
    return sum(name in programs.FRAMEWORKS or name in LAUNCHERS for name in names) <= _LAUNCHERS_MAX


def of_container(words: list[str]) -> Command:
    """Return what a container's command starts. torchrun and ddprun are found behind an unknown program as well."""
    words = words[:WORDS_READ_MAX]
    found = read(words)
    if found.has_torchrun_options or found.launcher not in ("", "python"):
        return found
    for one in _commands(words):
        begin = options_begin(one) if one and one[0] not in _PRINTERS else None
        behind = Command() if begin is None else _of_torchrun(_launcher_name(one[begin - 1]), one[begin:])
        if behind.named:
            return behind
    return found


def by_torchrun(words: list[str]) -> Command | None:
    """Return what torchrun, `python -m torch.distributed.run` or ddprun starts; None for other commands."""
    found = of_container(words)
    return found if found.has_torchrun_options else None


def script_of(words: list[str]) -> str | None:
    """Return the Python file that a command starts; None if a shell or a program before it may change the folder."""
    is_plain = bool(words) and not is_shell(words) and programs.name(words[0]) not in programs.WRAPPERS
    script = read(words).script if is_plain else None
    return script if script is not None and script.endswith(".py") else None


def starts_nothing(words: list[str]) -> bool:
    """True if a command is a launcher without a script. False for a shell, whose script may start anything."""
    begin = None if is_shell(words) else options_begin(words)
    if begin is None:
        return False
    options, rest = read_options(words[begin:])
    return not rest and not {"help", "h"} & set(options)


def is_shell(words: list[str]) -> bool:
    return bool(words) and words[0].rsplit("/", 1)[-1] in SHELLS


def joined(words: list[str]) -> str:
    """Return the first word that should be several words, such as "torchrun train.py"; "" if there is none."""
    if words and _is_joined_program(words[0]):
        return words[0]
    begin = None if is_shell(words) else options_begin(words)
    if begin is not None:
        options, rest = split_options(words[begin:])
        own = [*(group[0] for _, group in options), *rest[:1]]
    else:
        place = next((i for i in programs.places(words) if PYTHON.match(programs.name(words[i]))), len(words))
        following = words[place + 1 :]
        own = following[: len(following) - len(after_python_options(following)) + 1]
    return next((word for word in own if _JOINED.match(word)), "")


def _is_joined_program(word: str) -> bool:
    """True unless the word is a path with a space: `/opt/my tools/python`."""
    first, *rest = word.split() or [""]
    if not rest or _is_known(programs.name(word.strip())):
        return False
    return "/" not in first or _is_known(programs.name(first)) or any(w.startswith("-") for w in rest)


def _is_known(program: str) -> bool:
    return starts_scripts(program) or program in (*SHELLS, *programs.FRAMEWORKS, *programs.WRAPPERS)


def starts_scripts(program: str) -> bool:
    """True for torchrun, ddprun and Python."""
    return program in LAUNCHERS or PYTHON.match(program) is not None


def _commands(words: list[str], depth: int = 0) -> Iterator[list[str]]:
    """Return the command, or each command of a shell's script, without the variables set before it."""
    shells = (i for i in programs.places(words) if programs.name(words[i]) in SHELLS)
    script = shell_script(words[next(shells, len(words)) :])
    if script is None:
        yield words
    elif len(script) <= SCRIPT_READ_MAX and depth < _SHELL_DEPTH_MAX:
        for one in shell_commands(script):
            yield from _commands(one, depth + 1)


def _read(words: list[str]) -> Command:
    program = programs.name(words[0]) if words else ""
    if PYTHON.match(program):
        return _of_python(words[1:])
    if program in LAUNCHERS:
        return _of_torchrun(program, words[1:])
    if program in programs.FRAMEWORKS:
        return _of_framework(program, words[1:])
    if program in programs.WRAPPERS:
        return _behind("", words)
    return Command("python", words[0], words=tuple(words[1:])) if program.endswith(".py") else Command()


def _of_python(words: list[str]) -> Command:
    rest = after_python_options(words)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return _of_module(rest[1], rest[2:])
    if rest and LAUNCHER_FILE.search(rest[0]):
        return _of_torchrun(_launcher_name(rest[0]), rest[1:])
    if rest and _is_script(rest[0]):
        return Command("python", rest[0], words=tuple(rest[1:]))
    return Command("python")


def _is_script(word: str) -> bool:
    """True if Python reads the word as a script: train.py, or a file without a suffix as pip installs it."""
    return word.endswith(".py") or re.fullmatch(r"(?:[\w.@+-]*/)*[\w@+][\w@+-]*", word) is not None


def _of_module(module: str, rest: list[str]) -> Command:
    if _is_module(module):
        return _of_torchrun(module, rest)
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
    options, rest = read_options(words)
    given = tuple(rest[2:] if rest[1:2] == ["--"] else rest[1:])  # the launcher removes the first --
    if "no_python" in options:
        inner = read(rest) if is_shell(rest) else _behind(name, rest)
        return replace(inner, launcher=name, options=options)
    if "module" in options:
        return Command(name, module=next(iter(rest), None), words=given, options=options)
    return Command(name, rest[0] if rest and _is_script(rest[0]) else None, words=given, options=options)


def _of_framework(program: str, words: list[str]) -> Command:
    rest = programs.launch_options([program, *words])
    return Command() if rest is None else _behind(program, rest)


def _behind(name: str, words: list[str]) -> Command:
    """Return what a launcher with unknown options starts. name: "" if `words` begin with a wrapper, not a launcher."""
    places = range(len(words)) if name else itertools.islice(programs.places(words), 1, None)
    for i in places:
        word, program = words[i], programs.name(words[i])
        if starts_scripts(program) or program in programs.FRAMEWORKS:
            inner = _read(words[i:])
            return replace(inner, launcher=name) if name and inner.launcher == "python" else inner
        if word in ("-m", "--module") and words[i + 1 : i + 2] and not words[i + 1].startswith("-"):
            inner = _of_module(words[i + 1], words[i + 2 :])
            return replace(inner, launcher=name) if name and inner.launcher == "python" else inner
        if word.endswith(".py") and not word.startswith("-"):
            return Command(name or "python", word, words=tuple(words[i + 1 :]))
    return Command(name)


def options_begin(words: list[str]) -> int | None:
    """Return the index of the word after torchrun or ddprun; None without a launcher that starts ranks."""
    for i, (word, following) in enumerate(itertools.pairwise([*words, ""])):
        begin = 0
        if _is_program(word):
            begin = i + 1
        elif word == "-m" and _is_module(following):
            begin = i + 2
        if begin and not programs.tells_of_itself(words[begin : begin + 1]):
            return begin
    return None


def starts_ranks(word: str) -> bool:
    """True for torchrun or ddprun as a program, a file or a module."""
    return _is_program(word) or _is_module(word)


def _is_program(word: str) -> bool:
    return programs.name(word) in LAUNCHERS or LAUNCHER_FILE.search(word) is not None


def _is_module(word: str) -> bool:
    return word in MODULES or word == "ddprun"


def _launcher_name(word: str) -> str:
    """Return the launcher's program or module; for the file of a module, the module."""
    file = LAUNCHER_FILE.search(word)
    return f"torch.distributed.{file[1]}" if file else programs.name(word)


def shell_script(words: list[str]) -> str | None:
    """Return the script of `sh -c "…"`; None for any other command."""
    return shell_call(words)[1] if is_shell(words) else None


def shell_call(words: list[str]) -> tuple[set[str], str | None, list[str]]:
    """Return the options of a shell (letters, and names after -o), its script after -c, and the words after them."""
    options: set[str] = set()
    rest = iter(words[1:])
    others: list[str] = []
    for word in rest:
        if word == "--" or not word.startswith(("-", "+")) or len(word) == 1:
            others = [*([] if word == "--" else [word]), *rest]
            break
        if word.startswith("--"):
            if word in ("--rcfile", "--init-file"):
                next(rest, "")
            continue
        options |= set(word[1:]) if word[0] == "-" else set()
        if word.endswith(("o", "O")):
            options |= {next(rest, "")}
    return options, others[0] if "c" in options and others else None, others


def shell_words(text: str) -> list[str]:
    return [word for command in shell.commands(text) for word in command]


def shell_commands(script: str) -> Iterator[list[str]]:
    """Return the words of each readable command of a shell's script, without wrappers before the program."""
    with contextlib.suppress(shell.ShellSyntaxError):
        for words in shell.commands(script):
            yield list(itertools.dropwhile(lambda word: word in _STARTS_OTHERS or "=" in word, words))


def after_python_options(words: list[str]) -> list[str]:
    """Return what `python` runs: a file, or -m or -c with the words after it."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    return rest


def read_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return torchrun's options by full name, and the words after them."""
    groups, rest = split_options(words)
    return {name: _value(name, group) for name, group in groups}, rest


def split_options(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return each of torchrun's options with its words, `--nnodes 2` or `--nnodes=2`, and the words after them."""
    options: list[tuple[str, list[str]]] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "--" or len(options) == OPTIONS_MAX:
            return options, [*([] if word == "--" else [word]), *rest]
        name, has_value, _ = word.lstrip("-").partition("=")
        full = _full_name(name) if word.startswith("--") else _SHORT.get(name, name)
        value = [] if full in _FLAGS or has_value else [following for following in [next(rest, None)] if following]
        options.append((full, [word, *value]))
    return options, []


def _value(name: str, group: list[str]) -> str:
    if name in _FLAGS:
        return "1"
    return group[1] if len(group) > 1 else group[0].partition("=")[2]


def _full_name(name: str) -> str:
    """Return the option's full name for an unambiguous prefix, as argparse does: nnodes for nnode."""
    name = name.replace("-", "_")
    matches = [o for o in OPTIONS if o.startswith(name)]
    return name if name in OPTIONS or len(matches) != 1 else matches[0]


def arguments_behind_script(arguments: Sequence[str]) -> list[str]:
    """Return the words after the script, preceded by `--` if a word could be an option. argparse checks these words
    too: an abbreviation of several options ends torchrun with `ambiguous option`, except in a new Python (3.12.8,
    3.13.1: gh-58573). An abbreviation of one option gets `--` too: another torch may have a second option."""
    is_taken = list(arguments[:1]) == ["--"] or any(_matches(word, "torchrun") for word in _before_dashes(arguments))
    return [*(["--"] if is_taken else []), *arguments]


def abbreviations(arguments: Sequence[str], by: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (argument, options) for each argument that the launcher `by` refuses: it abbreviates all these options."""
    for word in _before_dashes(arguments):
        matches = _matches(word, by)
        if len(matches) > 1:
            yield word.partition("=")[0], list(dict.fromkeys(match.replace("_", "-") for match in matches))


def _before_dashes(arguments: Sequence[str]) -> Iterator[str]:
    return itertools.takewhile(lambda word: word != "--", arguments)


def _matches(word: str, by: str) -> list[str]:
    """Return the options that a word abbreviates, in both spellings; none if the option is written out."""
    prefix = word.partition("=")[0]
    other = _OF_DDPRUN if by.endswith("launch") else _OF_DDPRUN | _OF_LAUNCH
    names = [name for name in OPTIONS if name not in other]
    spellings = dict.fromkeys(f"--{name}" for one in names for name in (one.replace("_", "-"), one))
    if len(prefix) < 3 or not prefix.startswith("--") or prefix in spellings:
        return []
    return [spelling for spelling in spellings if spelling.startswith(prefix)]

"""Programs in a command line that start other programs: wrappers, and the launchers of other frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import dropwhile

# Programs that start the command after them and change nothing about it.
WRAPPERS = set(
    "busybox catatonit chrt conda coverage docker-entrypoint.sh dumb-init entrypoint.sh env exec flock gosu hatch "
    "ionice kernprof mamba micromamba ncu nice nohup nsys numactl nvidia_entrypoint.sh pdm pipenv pixi poetry py-spy "
    "rye s6-setuidgid setpriv setsid stdbuf strace su-exec sudo taskset time timeout tini unbuffer uv viztracer "
    "xvfb-run".split()
)
# Options of wrappers whose next word is a name and not a program: `conda run -n ray`.
_NAME_FOLLOWS = {"-n", "--name", "-p", "--prefix", "--with", "--extra", "--group", "--package", "-u", "--user"}
# Programs whose `-n` takes no value: `sudo -n` never prompts, `uv run -n` uses no cache.
_FLAGS = {
    "coverage": {"-p"}, "pdm": {"-n"}, "poetry": {"-n"}, "py-spy": {"-n"}, "strace": {"-n"}, "sudo": {"-n"},
    "time": {"-p"}, "timeout": {"-p"}, "uv": {"-n"}, "viztracer": {"-u"},
}  # fmt: skip
# Launcher → its subcommands that start ranks, which come before its options.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "accelerate": ("launch",), "colossalai": ("run",), "composer": (), "deepspeed": (), "fabric": ("run", "model"),
    "horovodrun": (), "lightning": ("run", "model"), "mpiexec": (), "mpirun": (), "orterun": (),
    "ray": ("job", "submit"), "srun": (), "tune": ("run",),
}  # fmt: skip
# Subcommands of the frameworks' launchers that start no ranks.
_NO_LAUNCH = set(
    "check config cp download env estimate-memory list logs ls memory merge-weights start status stop test "
    "validate".split()
)
_ABOUT_ITSELF = {"--help", "-h", "--version", "-V", "--check-build", "-cb"}


def name(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def places(words: Sequence[str]) -> Iterator[int]:
    """Yield the indexes of possible programs: the first word, and after a wrapper all words but option values."""
    wrapper = ""
    for i, word in enumerate(words):
        if i and not wrapper:
            return
        if i and words[i - 1] in _NAME_FOLLOWS - _FLAGS.get(wrapper, set()):
            continue
        yield i
        wrapper = name(word) if name(word) in WRAPPERS else wrapper


def tells_of_itself(options: Sequence[str]) -> bool:
    """True if a launcher only prints its help or version. A shell's `;` may end the word."""
    return any(word.rstrip(";") in _ABOUT_ITSELF for word in options[:1])


def launch_options(words: Sequence[str]) -> list[str] | None:
    """Return the options and the command of a framework's launcher; None for subcommands such as `ray stop`."""
    first = FRAMEWORKS[name(words[0])]
    rest = list(dropwhile(lambda word: word in first, words[1:]))
    if tells_of_itself(rest) or (first and _NO_LAUNCH.intersection(rest[:1])):
        return None
    return rest

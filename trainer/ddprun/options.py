"""torchrun's options as ddprun understands them: the same names, abbreviations, PET_ variables and defaults.

An option that ddprun does not have is refused with the reason, because a user who relies on it would find out too late.
Options about how torchrun itself works (--monitor-interval, --start-method, --local-addr) are accepted without effect.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from ddpjob_core.budget import BACKOFF_LIMIT, Budget, Grant, natural
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.members import NPROC_MAX, Members

T = TypeVar("T")

PORT = 29500
SHUTDOWN_SECONDS = 30.0
# Seconds; only enough for a last line of output, because ranks of a broken group cannot save together.
BROKEN_GRACE_SECONDS = 0.1
JOIN_SECONDS = 600.0  # time limit for all nodes to connect; torchrun's default for static rendezvous
LAST_CALL_SECONDS = 30.0  # torchrun's default
SNOOZE_SECONDS = 30.0
# torch, and what the first DistributedDataParallel imports (docs/dev/ddprun-internals.md).
PRELOAD = ("torch", "torch._dynamo")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_SIGNALS_NOT_TAKEN = ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD")  # cannot be handled; SIGCHLD reports the end of a rank
STREAMS_MAX = 3  # 1: stdout, 2: stderr, 3: both


class RankScript(NamedTuple):
    """What every rank runs."""

    name: str  # file, module or program
    args: tuple[str, ...]
    kind: str  # "script", "module", or "program" (--no-python)
    preload: tuple[str, ...]
    preload_asked: bool  # True if the user has named the modules to preload


class Output(NamedTuple):
    """Where the lines of the ranks go; redirects and tee are by local rank."""

    folder: str  # "": a temporary folder
    redirects: dict[int, int]
    tee: dict[int, int]
    shown: frozenset[int] | None  # local ranks whose output the console shows; None: all
    filters: tuple[tuple[str, ...], tuple[str, ...]]  # words that shown lines contain, for stdout and for stderr

    def shows(self, local_rank: int) -> bool:
        return self.shown is None or local_rank in self.shown

    def in_files(self, local_rank: int) -> int:
        """Return the streams of a rank that go to files: 1 stdout, 2 stderr, 3 both."""
        return self.redirects[local_rank] | self.tee[local_rank]


class Options(NamedTuple):
    """Settings of one agent."""

    nodes: int  # number of nodes that may take part, with the spares
    spares: int  # number of nodes that wait until another node is lost
    least: int  # smallest number of nodes that train
    is_elastic: bool  # True if the number of nodes may change
    place: int
    nproc: int
    host: str
    port: int | None  # port of node 0; None: any free port (only with a single node)
    run_id: str
    role: str
    budget: Budget
    grant: Grant | None
    policy: tuple[PolicyRule, ...]
    has_operator: bool  # True if an operator replaces lost pods
    local: bool  # True if all nodes are processes of one machine: `ddpjob run`
    dev: bool  # `ddpjob dev`: restart the ranks when a source file is saved, and not after a failure
    preflight: bool  # True if nodes measure each other before their first ranks start
    replacement: int  # how often the pod of this node was replaced in this attempt
    stall_seconds: float | None  # seconds without a step until a group counts as stalled; None: learned, 0: never
    broken_grace_seconds: float  # how long ranks have to stop after one has failed
    script: RankScript
    output: Output
    signals: tuple[str, ...]
    shutdown_seconds: float
    join_seconds: float
    last_call_seconds: float  # how long the first start waits for more nodes than `least`
    snooze_seconds: float  # how long a node is connected before it may interrupt the others to join them
    virtual_local_rank: bool

    @property
    def places(self) -> Members:
        """Numbers of all nodes that may take part."""
        return Members(range(self.nodes))


def parse(words: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse a command line; exit with 2 and a sentence if it is invalid."""
    parser = _parser(environ)
    read = parser.parse_args(words)
    try:
        return _options(read, environ)
    except ValueError as error:
        parser.error(str(error))


EXAMPLE = """\
examples:
  ddprun --nproc-per-node 4 train.py --lr 0.1                      four ranks on this machine
  ddprun --nnodes 2 --node-rank 0 --master-addr node-0 train.py    node 0 of two; a DDPJob sets these by itself
"""


class _Parser(argparse.ArgumentParser):
    ambiguous: dict[str, str]
    """By ambiguous abbreviation: the options that it could mean."""

    def _get_option_tuples(self, option_string: str) -> Any:
        """Accept two spellings of one option, which argparse before 3.12.3 calls ambiguous.

        argparse also calls this for the script's arguments, and before 3.12.8 it exits if one is ambiguous. So an
        ambiguous abbreviation is returned as unknown, and `error` explains it if it is before the script.
        """
        found = super()._get_option_tuples(option_string)
        options = list({match[0].dest: match for match in reversed(found)}.values())[::-1]
        if len(options) > 1:
            self.ambiguous[option_string] = ", ".join(match[1] for match in options)
            return []
        return options

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage text: its 17 lines would push the error off the screen."""
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if message != unknown and unknown in self.ambiguous:
            message = f"ambiguous option: {unknown} could match {self.ambiguous[unknown]}"
        elif "training_script" in message:
            message = "training_script is missing: what every rank runs, as in `ddprun train.py`"
        self.exit(2, f"{self.prog}: error: {message}\n(ddprun --help has all options)\n")


class _Version(argparse.Action):
    """Reads the version only if requested: importlib.metadata takes longer to import than argparse."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        print(f"{parser.prog} {metadata.version('ddpjob')}")
        parser.exit()


class _OptionGroup:
    """Options under one heading, each in both spellings, with its PET_ variable as default."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, environ: Mapping[str, str]) -> None:
        self._parser, self._group, self._environ = parser, parser.add_argument_group(title), environ

    def value(self, name: str, shown: str, about: str, default: str | None = None, *short: str) -> None:
        """Add an option with a value; `shown` stands for the value in the help text."""
        fallback = self._environ.get(_variable(name), default)
        self._group.add_argument(*short, f"--{name}", default=fallback, help=about, metavar=shown)
        self._second_spelling(name, "store", fallback)

    def flag(self, name: str, about: str, *short: str) -> None:
        """Add an option without a value."""
        text = self._environ.get(_variable(name)) or "0"
        if text not in ("0", "1"):  # as in torchrun; otherwise "false" would count as true
            self._parser.error(f"{_variable(name)}: {text[:100]!r} is neither 0 nor 1.")
        fallback = text == "1"
        self._group.add_argument(*short, f"--{name}", action="store_true", default=fallback, help=about)
        self._second_spelling(name, "store_true", fallback)

    def _second_spelling(self, name: str, action: str, fallback: object) -> None:
        if "-" in name:
            underscored = name.replace("-", "_")
            self._group.add_argument(f"--{underscored}", action=action, default=fallback, help=argparse.SUPPRESS)


def _variable(name: str) -> str:
    return f"PET_{name.replace('-', '_').upper()}"


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddprun",
        usage="ddprun [options] training_script [arguments of the script]",
        description="Start the ranks of a distributed training on this node, with torchrun's options.",
        epilog=EXAMPLE,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=110),
    )
    parser.ambiguous = {}
    parser.add_argument("--version", nargs=0, action=_Version, help="show the version and exit")
    _add_nodes(_OptionGroup(parser, "nodes and ranks", environ))
    _add_script(_OptionGroup(parser, "the script", environ))
    _add_restarts(_OptionGroup(parser, "restarts and signals", environ))
    parser.set_defaults(max_restarts=None)  # DDPJOB_RESTARTS_LEFT has priority over PET_MAX_RESTARTS
    _add_logs(_OptionGroup(parser, "output", environ))
    _add_others(_OptionGroup(parser, "accepted without effect, or refused", environ))
    what = parser.add_argument_group("what to run")
    what.add_argument("training_script", help="what every rank runs")
    what.add_argument("training_script_args", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _add_nodes(group: _OptionGroup) -> None:
    group.value("nnodes", "N", "number of nodes, or MIN:MAX", "1")
    group.value("nproc-per-node", "N", "ranks on this node: a number, cpu, gpu or auto", "1")
    group.value("node-rank", "N", "which of the nodes this is")
    group.value("master-addr", "HOST", "host name or address of node 0", "127.0.0.1")
    group.value("master-port", "PORT", "the port of node 0 for the rendezvous")
    group.value("rdzv-backend", "NAME", "static or c10d; both rendezvous at node 0", "static")
    group.value("rdzv-endpoint", "HOST:PORT", "node 0", "")
    group.value("rdzv-id", "ID", "the name of this run", "none")
    conf = (
        "timeout or join_timeout (seconds to wait for the others); of MIN:MAX nodes last_call_timeout (for more than "
    )
    conf += "MIN, at the first start) and snooze (until a node that comes later joins) (30)"
    group.value("rdzv-conf", "K=V,…", conf, "")
    group.flag("standalone", "one node, any free port")
    group.flag("virtual-local-rank", "LOCAL_RANK is 0 everywhere, CUDA_VISIBLE_DEVICES one GPU")


def _add_script(group: _OptionGroup) -> None:
    group.flag("module", "the script is a module, as for python -m", "-m")
    group.flag("no-python", "the script is a program")
    group.value("preload", "NAMES", f"modules imported once, before ranks are forked ({','.join(PRELOAD)})")
    group.flag("no-preload", "every rank is a new Python process")


def _add_restarts(group: _OptionGroup) -> None:
    group.value(
        "max-restarts", "N", f"maximum of restarts in place ({BACKOFF_LIMIT}); DDPJOB_RESTARTS_LEFT can lower it"
    )
    group.value("signals-to-handle", "NAMES", "signals that end the job", ",".join(SIGNALS))
    group.value("shutdown-timeout", "SECONDS", "time between SIGTERM and SIGKILL (30)")


def _add_logs(group: _OptionGroup) -> None:
    group.value("role", "NAME", "the name before each line of --tee", "default")
    group.value("log-dir", "DIR", "folder for the files of --redirects and --tee")
    group.value("redirects", "N", "streams into files: 1 stdout, 2 stderr, 3 both; or 0:1,1:3 by local rank", "0", "-r")
    group.value("tee", "N", "streams into files and to the console", "0", "-t")
    group.value("local-ranks-filter", "RANKS", "only these local ranks are shown on the console: 0,1", "")
    filtered = "lines of --tee with one of these words also go to filtered_stdout.log"
    group.value("duplicate-stdout-filters", "WORDS", filtered, "")
    group.value("duplicate-stderr-filters", "WORDS", "likewise for stderr", "")


def _add_others(group: _OptionGroup) -> None:
    group.flag("run-path", "no effect: the script is run by its path in any case")
    group.value("monitor-interval", "S", "no effect: a rank's end is noticed at once")
    group.value("start-method", "NAME", "no effect")
    group.value("local-addr", "HOST", "no effect: node 0 is found by its name")
    group.value("event-log-handler", "NAME", "refused: ddprun has no torch events", "null")
    group.value("logs-specs", "NAME", "refused: a class of torch")
    group.value("numa-binding", "NAME", "refused: ddprun binds no process to CPUs")


def _options(read: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    _refuse(read)
    least, nodes = (1, 1) if read.standalone else _nodes(read.nnodes)
    nproc = _nproc(read.nproc_per_node, environ)
    host, port = ("127.0.0.1", None) if read.standalone else _endpoint(read, nodes)
    _refuse_more_nodes(least, host, environ)
    conf, grant = _pairs(read.rdzv_conf), granted(environ)
    joined = conf.get("join_timeout") or conf.get("timeout")
    shutdown = read.shutdown_timeout or environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    stall, grace = (environ.get(name) for name in ("DDPJOB_STALL_TIMEOUT", "DDPJOB_RESTART_GRACE"))
    return Options(
        nodes=nodes,
        spares=_count("DDPJOB_SPARES", environ),
        least=least,
        is_elastic=":" in read.nnodes and not read.standalone,
        place=_node_rank(read.node_rank, nodes),
        nproc=nproc,
        host=host,
        port=port,
        run_id=_run_id(read, port),
        role=read.role,
        budget=budget(read.max_restarts, grant, environ),
        grant=grant,
        policy=_policy(environ.get("DDPJOB_FAILURE_POLICY")),
        has_operator=grant is not None,
        local=environ.get("DDPJOB_LOCAL") == "1",
        dev=environ.get("DDPJOB_DEV") == "1",
        preflight=environ.get("DDPJOB_PREFLIGHT") == "1",
        replacement=_count("DDPJOB_REPLACEMENT", environ),
        stall_seconds=_seconds("DDPJOB_STALL_TIMEOUT", stall, None),
        broken_grace_seconds=_seconds("DDPJOB_RESTART_GRACE", grace, BROKEN_GRACE_SECONDS),
        script=_script(read),
        output=Output(
            folder=read.log_dir or "",
            redirects=_streams("redirects", read.redirects, nproc),
            tee=_streams("tee", read.tee, nproc),
            shown=_ranks(read.local_ranks_filter),
            filters=(_words(read.duplicate_stdout_filters), _words(read.duplicate_stderr_filters)),
        ),
        signals=_signals(read.signals_to_handle),
        shutdown_seconds=_seconds("--shutdown-timeout", shutdown, SHUTDOWN_SECONDS),
        join_seconds=_seconds("--rdzv-conf: timeout", joined, JOIN_SECONDS),
        last_call_seconds=_seconds("--rdzv-conf: last_call_timeout", conf.get("last_call_timeout"), LAST_CALL_SECONDS),
        snooze_seconds=_seconds("--rdzv-conf: snooze", conf.get("snooze"), SNOOZE_SECONDS),
        virtual_local_rank=read.virtual_local_rank,
    )


def _script(read: argparse.Namespace) -> RankScript:
    is_forked = not (read.no_preload or read.no_python)
    return RankScript(
        name=read.training_script,
        args=tuple(read.training_script_args),
        kind="program" if read.no_python else "module" if read.module else "script",
        preload=(PRELOAD if read.preload is None else _names(read.preload)) if is_forked else (),
        preload_asked=read.preload is not None,
    )


def _refuse(read: argparse.Namespace) -> None:
    if read.rdzv_backend not in ("static", "c10d"):
        raise ValueError(
            f"--rdzv-backend: {read.rdzv_backend!r}: not supported. Use static or c10d: both rendezvous at node 0."
        )
    if read.event_log_handler != "null":
        raise ValueError(f"--event-log-handler: {read.event_log_handler!r}: ddprun has no torch events. Remove it.")
    if read.logs_specs is not None:
        raise ValueError(f"--logs-specs: {read.logs_specs!r} is a class of torch, which ddprun never loads. Remove it.")
    if read.numa_binding is not None:
        raise ValueError("--numa-binding: ddprun binds no process to CPUs. Remove it, or use torchrun.")
    if read.no_python and read.module:
        raise ValueError("--module: --no-python starts a program, not a module. Remove one of them.")


def _refuse_more_nodes(least: int, host: str, environ: Mapping[str, str]) -> None:
    """Refuse a smallest number of nodes that the job does not have, because this agent would wait forever."""
    most = environ.get("PET_NNODES", "").rpartition(":")[2]
    is_of_job = "DDPJOB_UID" in environ and host == environ.get("PET_MASTER_ADDR")
    if is_of_job and most.isdecimal() and least > int(most):
        raise ValueError(f"--nnodes: {least}: the job has {most} nodes, so this agent would wait for ever. Remove it.")


def _nodes(text: str) -> tuple[int, int]:
    """Parse 2 or 2:4: the smallest and the largest number of nodes."""
    low, _, high = text.partition(":")
    least = _number("nnodes", low, 1)
    return least, _number("nnodes", high, least) if high else least


def _node_rank(text: str | None, nodes: int) -> int:
    if text is None and nodes > 1:
        raise ValueError(f"--node-rank: missing; each of the {nodes} nodes has its own, 0 to {nodes - 1}.")
    rank = _number("node-rank", text or "0", 0)
    if rank >= nodes:
        raise ValueError(f"--node-rank: {rank} is not below --nnodes: {nodes}.")
    return rank


def _nproc(text: str, environ: Mapping[str, str]) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "auto"):
        gpus = _gpus(environ)
        if gpus == 0 and text == "gpu":
            raise ValueError("--nproc-per-node: gpu: no NVIDIA GPU is visible here. Give a number.")
        return gpus or len(os.sched_getaffinity(0))
    if text == "xpu":
        raise ValueError("--nproc-per-node: xpu: only NVIDIA GPUs can be counted without torch. Give a number.")
    number = _number("nproc-per-node", text, 1)
    if number > NPROC_MAX:
        raise ValueError(f"--nproc-per-node: {number}: at most {NPROC_MAX} ranks on a node.")
    return number


def _gpus(environ: Mapping[str, str]) -> int:
    """Count GPUs that a rank can use: /dev/nvidia0 …, as far as CUDA_VISIBLE_DEVICES allows."""
    present = sum(name[6:].isdecimal() for name in os.listdir("/dev") if name.startswith("nvidia"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [part.strip() for part in visible.split(",")]
    end = next((i for i, part in enumerate(named) if part in ("", "-1")), len(named))  # CUDA stops at such an entry
    return min(present, end)


def _endpoint(read: argparse.Namespace, nodes: int) -> tuple[str, int | None]:
    if read.rdzv_endpoint:
        host, text = _host_and_port(read.rdzv_endpoint.strip())
        port: int | None = _port("rdzv-endpoint", text)
    else:
        host = read.master_addr
        port = None if read.master_port is None else _port("master-port", read.master_port)
    host = host.strip("[]")  # torch's store accepts ::1 and not [::1]
    if nodes == 1:
        return host, port or None
    if port == 0:
        raise ValueError(f"--rdzv-endpoint: port 0 is a different port on each of {nodes} nodes. Give one port.")
    return host, port or PORT


def _host_and_port(endpoint: str) -> tuple[str, str]:
    """Split host:29400, host, [::1]:29400, [::1], ::1."""
    host, colon, text = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]") or (":" in host and not host.endswith("]")):
        return endpoint, str(PORT)
    if not host:
        raise ValueError(f"--rdzv-endpoint: {endpoint!r} has no host. Give that of node 0: host:port.")
    return host, text


def _run_id(read: argparse.Namespace, port: int | None) -> str:
    """Return the run id. As in torchrun, a run without a fixed port gets a random one."""
    if port is not None or (read.rdzv_id != "none" and not read.standalone):
        return str(read.rdzv_id)
    digits = os.urandom(16).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def granted(environ: Mapping[str, str]) -> Grant | None:
    """Return the operator's grant (number of restarts left); None without an operator. Raise ValueError."""
    text = environ.get("DDPJOB_RESTARTS_LEFT")
    return Grant.read(text) if text else None


def budget(asked: str | None, grant: Grant | None, environ: Mapping[str, str]) -> Budget:
    """Combine the operator's grant and --max-restarts; without both use PET_MAX_RESTARTS, else 3."""
    if grant is not None and asked is None:
        return Budget.of(grant, None)
    if asked is None:
        asked = environ.get("PET_MAX_RESTARTS", str(BACKOFF_LIMIT))
    most = _number("max-restarts", asked, 0)
    return Budget.of(grant or Grant(most, most, most), most)


def _policy(text: str | None) -> tuple[PolicyRule, ...]:
    try:
        return tuple(_policy_rule(rule) for rule in json.loads(text or "[]"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        example = '[{"action": "FailJob", "codes": [3], "notIn": false}]'
        raise ValueError(
            f"DDPJOB_FAILURE_POLICY: {str(text)[:200]!r} is not {example}; action is FailJob, Ignore or Count."
        ) from None


def _policy_rule(rule: Any) -> PolicyRule:
    if rule["action"] not in ("FailJob", "Ignore", "Count"):
        raise ValueError(rule)
    return PolicyRule(rule["action"], frozenset(map(natural, rule["codes"])), rule.get("notIn", False) is True)


def _count(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    try:
        return natural(int(text or "0"))
    except ValueError:
        raise ValueError(f"{name}: {text[:100]!r} is not 0, 1, …") from None


def _streams(name: str, text: str, nproc: int) -> dict[int, int]:
    """Parse `3`, or `0:1,1:3`: streams of each local rank."""
    if text.isdecimal() and int(text) <= STREAMS_MAX:
        return dict.fromkeys(range(nproc), int(text))
    streams_of: dict[int, int] = {}
    for part in text.split(","):
        rank, _, streams = part.partition(":")
        if not (rank.isdecimal() and streams.isdecimal() and int(streams) <= STREAMS_MAX):
            raise ValueError(f"--{name}: {text!r} is neither 0 to 3 nor a list like 0:1,1:3.")
        streams_of[int(rank)] = int(streams)
    return {rank: streams_of.get(rank, 0) for rank in range(nproc)}


def _ranks(text: str) -> frozenset[int] | None:
    return frozenset(_number("local-ranks-filter", part, 0) for part in text.split(",")) if text else None


def _words(text: str) -> tuple[str, ...]:
    """Split at commas; two commas stand for a comma in a word."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")) if text else ()


def _signals(text: str) -> tuple[str, ...]:
    """Refuse signals that cannot be handled: they would end the node and all its ranks at once."""
    for name in (names := _names(text)):
        if name not in signal.Signals.__members__ or name in _SIGNALS_NOT_TAKEN:
            raise ValueError(
                f"--signals-to-handle: {name[:100]!r} is not a signal that can be handled, such as SIGUSR1."
            )
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pairs(text: str) -> dict[str, str]:
    """Parse K=V,…; as in torchrun, each key needs a value. Raise ValueError."""
    pairs = {}
    for part in filter(str.strip, text.split(",")):
        key, value = (side.strip() for side in part.partition("=")[::2])
        if not key:
            raise ValueError(f"--rdzv-conf: {part[:100]!r} has no name. Give it as timeout=60.")
        if not value:
            raise ValueError(f"--rdzv-conf: {key[:100]!r} has no value. Give it as {key[:100]}=60.")
        pairs[key] = value
    return pairs


def _number(name: str, text: str | int, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"--{name}: {text!r} is not a number.") from None
    if value < least:
        raise ValueError(f"--{name}: {value} is less than {least}.")
    return value


def _port(name: str, text: str) -> int:
    port = _number(name, text, 0)
    if port > 65535:
        raise ValueError(f"--{name}: {port} is not a port: at most 65535.")
    return port


def _seconds(name: str, text: str | None, default: T) -> float | T:
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{name}: {text[:100]!r} is not a number of seconds.")
    return seconds

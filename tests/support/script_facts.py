"""A script that writes everything it can observe to $FACTS, to compare ways of starting a rank."""

from typing import Any

from ddpjob_core.heartbeat import STACKS_SIGNAL
from ddprun.core import crash
from ddprun.forkserver import CRASH_DESCRIPTOR

FACTS = '''
"""The documentation of the script."""
import json, os, pickle, random, signal, sys, threading

class Mine:
    """Defined in __main__."""

def facts():
    import __main__
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
    own = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "DDPJOB_TERMINATION_LOG", "TORCHELASTIC_RUN_ID", "DDPJOB_BEATS",
           "DDPJOB_END", "DDPJOB_MEMORY")
    environ = {k: v for k, v in os.environ.items() if k not in own}
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "flags": str(sys.flags),
        "executable": sys.executable, "cwd": os.getcwd(), "environ": environ,
        "main": sorted(k for k in vars(__main__) if k.startswith("__")),
        "name": __name__, "file": __file__, "doc": __doc__, "spec": __spec__ and (__spec__.name, __spec__.origin),
        "package": __package__,
        "loader": type(__loader__).__name__ if not isinstance(__loader__, type) else __loader__.__name__,
        "builtins": type(__builtins__).__name__,
        "is main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine and Mine.__module__,
        "signals": {k: status[k].strip() for k in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": {n: str(signal.getsignal(n)).split(" at ")[0] for n in (1, 2, 13, 15, 17)},
        "wakeup": signal.set_wakeup_fd(-1),
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "descriptors": [n for n in sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd/" + n)],
        "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
        "thread": (threading.current_thread() is threading.main_thread(), threading.main_thread().ident is not None),
        "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__,
                     s.fileno()) for s in (sys.stdout, sys.stderr, sys.stdin)],
        "same streams": sys.stdout is sys.__stdout__,
        "hooks": sys.excepthook is sys.__excepthook__,
        "umask": os.umask(0), "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)),
        "gc": (__import__("gc").isenabled(), __import__("gc").get_threshold()),
        "depth": len(__import__("inspect").stack()) < 8,
    }

if __name__ == "__main__":
    json.dump(facts(), open(os.environ["FACTS"], "w"))
'''


def differences(forked: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Return how a forked rank differs from a new process. Intended differences are left out: lines are written in one
    piece, and crashes and stacks are recorded."""
    meant = {**fresh, "streams": [_of_lines(stream) for stream in fresh["streams"]]}
    meant["descriptors"] = [*fresh["descriptors"], str(CRASH_DESCRIPTOR)]
    caught = int(fresh["signals"]["SigCgt"], 16) | sum(1 << number - 1 for number in (*crash.SIGNALS, STACKS_SIGNAL))
    meant["signals"] = {**fresh["signals"], "SigCgt": f"{caught:016x}"}
    return {key: (forked[key], meant[key]) for key in meant if forked[key] != meant[key]}


def _of_lines(stream: list[Any]) -> list[Any]:
    name, mode, encoding, errors, _, write_through, *rest = stream
    return stream if name == "<stdin>" else [name, mode, encoding, errors, True, not write_through, *rest]

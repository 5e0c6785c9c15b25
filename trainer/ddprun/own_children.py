"""A process whose every descendant it has started itself: for `ddprun` and `ddpjob run`, which kill all of theirs.

An entry point like `tensorboard & exec ddprun train.py` makes the tensorboard a child of ddprun, and a container's
PID 1 is given the orphans of everything in it, of `kubectl exec` too. Neither the environment nor the session of a
process proves whose it is: both can be changed. So a process that has children which it did not start, or
may get some, forks: the child does the work and has only its own children; the parent keeps the others and only waits.
"""

from __future__ import annotations

import os
import signal

from ddprun import processes

# Not passed on: the kernel or a terminal sends these to this very process, and SIGCONT and SIGWINCH need no answer.
_OWN = "KILL STOP SEGV BUS FPE ILL ABRT TRAP SYS TSTP TTIN TTOU CONT PIPE WINCH URG XFSZ XCPU"
OWN_SIGNALS = frozenset(getattr(signal, f"SIG{name}") for name in _OWN.split())


def stand_apart() -> None:
    """From here on this process has no children but those that it starts. To be called while it has one thread,
    because only the thread that forks goes on in the child."""
    # Who started this process may have ignored it, which lasts: the kernel would then reap the child, and tell nobody.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getpid()
    if parent != 1:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has none
            return
    # Blocked across the fork, otherwise a signal that comes before the parent waits for it would end the parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN_SIGNALS)
    child = os.fork()
    if child:
        _wait_and_end(child)
    processes.end_with(parent)
    # A group of its own, so that Ctrl-C reaches the parent alone, which passes it on: a second SIGINT means "at once".
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # otherwise a terminal set to `tostop` stops it when it prints
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_and_end(child: int) -> None:
    """Pass on every signal, reap whoever ends, and end as the child did: 128 + n for signal n."""
    while True:
        number = signal.sigwait(signal.valid_signals() - OWN_SIGNALS)
        if number != signal.SIGCHLD:
            os.kill(child, number)  # not yet reaped, so the pid is still its own
            continue
        code = dict(processes.reaped()).get(child)
        if code is not None:
            os._exit(code if code >= 0 else 128 - code)

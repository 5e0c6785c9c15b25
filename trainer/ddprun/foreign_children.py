"""Ensure that `ddprun` and `ddpjob run` have started all their descendants, because they kill all of them.

An entry point like `tensorboard & exec ddprun train.py` makes tensorboard a child of ddprun. A container's PID 1 also
adopts all orphans, even those of `kubectl exec`. Neither environment nor session proves who started a process: both can
be changed. So a process that has other children, or may get some, forks: the child does the work and has only its own
children; the parent keeps the others and waits.
"""

from __future__ import annotations

import os
import signal

from ddprun import processes

# Signals that are not passed on: the kernel or a terminal sends them to this process. CONT and WINCH can be ignored.
_OWN = "KILL STOP SEGV BUS FPE ILL ABRT TRAP SYS TSTP TTIN TTOU CONT PIPE WINCH URG XFSZ XCPU"
OWN_SIGNALS = frozenset(getattr(signal, f"SIG{name}") for name in _OWN.split())


def stand_apart() -> None:
    """Fork if needed, so that this process has no foreign children. Call it while there is one thread, because only the
    forking thread exists in the child.
    """
    # SIGCHLD may be inherited as ignored: the kernel would then reap the child without telling us.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getpid()
    if parent != 1:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # no children
            return
    # Signals are blocked until the parent waits for them. Before that, a signal would end the parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN_SIGNALS)
    child = os.fork()
    if child:
        _wait_and_end(child)
    processes.end_with(parent)
    # In its own process group the child gets Ctrl-C only once, from its parent. A second SIGINT would end it at once.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # otherwise a terminal set to `tostop` stops it when it prints
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_and_end(child: int) -> None:
    """Pass on every signal, reap children, and end as the child did: with 128 + n for signal n."""
    while True:
        number = signal.sigwait(signal.valid_signals() - OWN_SIGNALS)
        if number != signal.SIGCHLD:
            os.kill(child, number)  # the child is not reaped yet, so its pid is not reused
            continue
        code = dict(processes.reaped()).get(child)
        if code is not None:
            os._exit(code if code >= 0 else 128 - code)

"""A process whose every descendant it has started itself: for `ddprun` and `ddpjob run`, which kill all of theirs.

An entry point like `tensorboard & exec ddprun train.py` makes the tensorboard a child of ddprun, and a container's
PID 1 is given the orphans of everything in it, of `kubectl exec` too. Neither the environment nor the session of a
process proves whose it is: both can be changed. So where a process has children that it did not start, or may get some,
it forks: the child does the work, and has no others; the parent keeps the others, and only waits.
"""

from __future__ import annotations

import os
import signal

PR_SET_PDEATHSIG = 1
# A process that fails, or a terminal, means these for this very process; SIGCONT and SIGWINCH say nothing to us.
_OWN = "KILL STOP SEGV BUS FPE ILL ABRT TRAP SYS TSTP TTIN TTOU CONT PIPE WINCH URG XFSZ XCPU"
OWN_SIGNALS = frozenset(getattr(signal, f"SIG{name}") for name in _OWN.split())


def stand_apart() -> None:
    """From here on this process has no children but those that it starts. To be called while it has one thread."""
    if _has_others():
        _continue_in_a_child()


def _has_others() -> bool:
    if os.getpid() == 1:
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _continue_in_a_child() -> None:
    """Returns in the child."""
    parent = os.getpid()
    # Blocked across the fork: what comes before the parent waits is not lost, and is not the default's end of it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - OWN_SIGNALS)
    child = os.fork()
    if child:
        _wait_and_end(child)
    import ctypes  # a job waits for it: only where it is needed

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was killed before the line above: that signal will never come
        os._exit(128 + signal.SIGKILL)
    # A group of its own: Ctrl-C reaches the parent alone, which passes it on; twice would be impatience.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal set to `tostop` would hold it for what it prints
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_and_end(child: int) -> None:
    """Pass on every signal, reap whoever ends, and end as the child did: 128 + n for signal n."""
    while True:
        number = signal.sigwait(signal.valid_signals() - OWN_SIGNALS)
        if number != signal.SIGCHLD:
            os.kill(child, number)  # not yet reaped, so the number is still its own
            continue
        code = _reaped(child)
        if code is not None:
            os._exit(code if code >= 0 else 128 - code)


def _reaped(child: int) -> int | None:
    """The exit code of the child where it has ended, or the negative of its signal."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)

"""A forked rank has the same environment as a new process. Each fact is compared between both."""

import json
import os
import signal
import sys
import zipfile
from typing import Any

import pytest
from agents import Launcher
from script_facts import FACTS, differences

from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddprun.core.charges import REPEATS


def facts(launcher: Launcher, *words: object, **env: str) -> Any:
    path = launcher.folder / "facts.json"
    done = launcher.done(*words, FACTS=str(path), **env)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("how", ["train.py a -b", "./train.py", "deep/train.py", "-m train a", "-m pkg"])
def test_everything_visible_to_a_script_is_as_in_a_new_process(launcher: Launcher, how: str) -> None:
    for folder in ("", "deep", "pkg"):
        (launcher.folder / folder).mkdir(exist_ok=True)
        launcher.script(FACTS, os.path.join(folder, "train.py"))
    launcher.script(FACTS, "pkg/__main__.py")
    launcher.script("", "pkg/__init__.py")
    forked = facts(launcher, "--preload=json,decimal", *how.split(), OF_THE_USER="1")
    fresh = facts(launcher, "--no-preload", *how.split(), OF_THE_USER="1")
    assert differences(forked, fresh) == {}


def test_a_broken_connection_raises_an_error_and_does_not_kill_a_forked_rank(launcher: Launcher) -> None:
    """A broken connection must raise an error: SIGPIPE's default action would kill a survivor before it saves."""
    script = launcher.script("import signal; print(signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGXFSZ))")
    ignored = f"{signal.SIG_IGN!s} {signal.SIG_IGN!s}\n"
    assert launcher.done(script).stdout == ignored
    assert launcher.warm(script).communicate(timeout=120)[0] == ignored


def test_imports_are_done_once_and_not_by_each_rank(launcher: Launcher) -> None:
    launcher.script("open('imports', 'a').write('x')", "heavy.py")
    script = launcher.script(
        "import os, sys; assert 'heavy' in sys.modules; os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or sys.exit(1)"
    )
    assert launcher.done("--preload=heavy", "--nproc", 3, script).returncode == 0
    assert (launcher.folder / "imports").read_text() == "x"


def test_the_garbage_collector_ignores_imported_objects(launcher: Launcher) -> None:
    """The garbage collector must ignore imported objects: it would take a quarter of the import time, and in each rank
    copy torch's memory."""
    launcher.script("import gc\nlooked_at = [gc.get_stats()[2]['collections']]\nkept = list(range(9))\n", "many.py")
    names = "import many, gc; print(many.looked_at, gc.get_stats()[2]['collections'], gc.get_freeze_count() > 1000)"
    done = launcher.done("--preload=decimal,many", launcher.script(names))
    assert done.stdout.splitlines() == ["[0] 0 True"], done.stderr


def test_garbage_collector_settings_of_a_preloaded_module_are_kept(launcher: Launcher) -> None:
    launcher.script("import gc\ngc.disable()\n", "off.py")
    launcher.script("import gc\ngc.set_threshold(7, 8, 9)\n", "own.py")
    script = launcher.script("import gc; print(gc.isenabled(), gc.get_threshold() == (7, 8, 9))")
    assert launcher.done("--preload=off", script).stdout == "False False\n"
    assert launcher.done("--preload=own", script).stdout == "True True\n"


def test_an_exception_is_printed_as_by_a_new_process_and_exit_handlers_run(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import atexit
        atexit.register(print, "at exit")
        def f(): raise ValueError("mine")
        f()
        """
    )
    forked = launcher.done("--preload=json", "--max-restarts", 0, script)
    fresh = launcher.done("--no-preload", "--max-restarts", 0, script)
    assert fresh.stdout == "at exit\n"
    traces = [done.stderr.partition("ddprun: ") for done in (forked, fresh)]
    assert (forked.returncode, forked.stdout, traces[0][0]) == (fresh.returncode, fresh.stdout, traces[1][0])
    said = f"rank 0 ended with exit code 1 in train.py:4 (ValueError: mine); {REPEATS}"
    assert said in traces[0][2], "without the library, without @record"


def test_a_stopped_rank_ends_as_a_new_process_but_without_the_teardown_of_imported_modules(launcher: Launcher) -> None:
    """A stopped rank must end like a new process, but without destroying torch, which takes 0.25 s of CPU time."""
    of_class = "class Noted:\n    def __init__(self, name): self.name = name\n    def __del__(self): print(self.name)\n"
    launcher.script(f"{of_class}held = Noted('the module')\n", "noted.py")
    script = launcher.script(
        """
        import atexit, threading, noted
        from ddpjob.errors import Stopped
        global_object, file = noted.Noted("the script"), open("written", "w")
        file.write("it is in a buffer")
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
        raise Stopped(7)
        """
    )
    lines, written = [], []
    for how in ("--preload=noted", "--no-preload"):
        done = launcher.done(how, "--max-restarts", 0, script)
        assert done.returncode == RESUMABLE, done.stderr
        lines.append(done.stdout.splitlines())
        written.append((launcher.folder / "written").read_text())
    assert lines == [["a thread", "at exit", "the script"], ["a thread", "at exit", "the script", "the module"]]
    assert written == ["it is in a buffer"] * 2


@pytest.mark.parametrize(
    "line", ["raise SystemExit('bye')", "raise KeyboardInterrupt", "1 = 2", "import nothing_of_this_name"]
)
def test_every_way_to_exit_gives_the_same_exit_code(launcher: Launcher, line: str) -> None:
    script = launcher.script(line)
    codes = {
        start: launcher.done(start, "--max-restarts", 0, script).returncode
        for start in ("--preload=json", "--no-preload")
    }
    assert len(set(codes.values())) == 1, codes


def test_ranks_draw_different_random_numbers_from_python_and_numpy(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import random, sys, numpy
        numbers = random.random(), numpy.random.rand(), numpy.random.default_rng().random()
        sys.stdout.write(" ".join(map(str, numbers)) + "\\n")  # one write: those of two ranks do not mix
        """
    )
    done = launcher.done("--preload=numpy,numpy.random", "--nproc", 2, script)
    one, other = (line.split() for line in done.stdout.splitlines())
    assert all(a != b for a, b in zip(one, other, strict=True)), "all ranks would shuffle and augment alike"


def test_classes_of_the_script_are_known_in_the_children_it_spawns(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import multiprocessing
        class Mine:
            def __init__(self): self.value = 7
        def child(mine, queue): queue.put((type(mine).__name__, mine.value))
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(Mine(), queue))
            process.start()
            print(queue.get(timeout=30))
            process.join()
            assert process.exitcode == 0
        """
    )
    done = launcher.done("--preload=json", "--max-restarts", 0, script)
    assert (done.stdout, done.returncode) == ("('Mine', 7)\n", 0), done.stderr


def test_a_script_may_choose_another_start_method(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import multiprocessing
        def child(): print("child")
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
            process = multiprocessing.Process(target=child)
            process.start()
            process.join()
        """
    )
    assert launcher.done("--preload=json,multiprocessing", "--max-restarts", 0, script).stdout == "child\n"


# ---- refusals ----------------------------------------------------------------------------------------------


def test_a_preloaded_module_that_starts_a_thread_is_refused_and_the_ranks_start_without_it(launcher: Launcher) -> None:
    launcher.script(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads.py"
    )
    script = launcher.script("import sys; print('threads' in sys.modules)")
    done = launcher.done("--preload=threads", script)
    assert (done.stdout, done.returncode) == ("False\n", 0)
    assert "run 1 threads" in done.stderr


def test_openblas_may_use_threads_in_a_forked_rank(launcher: Launcher) -> None:
    """OpenBLAS in a forked rank must use all threads and give correct products."""
    script = launcher.script(
        """
        import os, sys
        assert "numpy" in sys.modules
        import numpy
        a = numpy.random.rand(600, 600)
        assert numpy.allclose((a @ a)[5], sum(a[5, k] * a[k] for k in range(600)))
        print(len(os.listdir("/proc/self/task")))
        """
    )
    done = launcher.done("--preload=numpy", "--max-restarts", 0, script, OMP_NUM_THREADS="3")
    assert (done.stdout, done.stderr) == (f"{min(3, len(os.sched_getaffinity(0)))}\n", "")


def test_a_missing_preload_module_is_named_and_the_others_are_loaded(launcher: Launcher) -> None:
    script = launcher.script("import sys; print('decimal' in sys.modules)")
    done = launcher.done("--preload=no_such_module,decimal", script)
    assert done.stdout == "True\n"
    assert "--preload: no_such_module: ModuleNotFoundError" in done.stderr


def test_the_job_continues_without_the_fork_server_if_it_is_killed(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal, subprocess, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                try: words, mark = (open(f"/proc/{pid}/{n}", errors="replace").read() for n in ("cmdline", "environ"))
                except OSError: continue
                if "forkserver.py" in words and os.environ["DDPTEST_MARK"] in mark and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            sys.exit(1)
        print("forked" if "forkserver.py" in open("/proc/self/cmdline").read() else "new")
        """
    )
    done = launcher.done("--preload=json", script)
    assert (done.stdout, done.returncode) == ("new\n", 0), done.stderr


def test_a_module_next_to_the_script_shadows_the_preloaded_one_as_in_a_new_process(launcher: Launcher) -> None:
    launcher.script("value = 'the user\\'s'", "statistics.py")
    script = launcher.script("import statistics; print(statistics.value)")
    assert launcher.done("--preload=statistics", script).stdout == "the user's\n"


def test_a_zip_file_runs_as_in_python(launcher: Launcher) -> None:
    with zipfile.ZipFile(launcher.folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import mine; print(mine.value)")
        archive.writestr("mine.py", "value = 3")
    assert launcher.done("--preload=json", "app.zip").stdout == "3\n"


def test_no_module_of_ddprun_shadows_the_standard_library() -> None:
    """No module of ddprun may shadow the standard library: the fork server runs as a file next to them."""
    import ddprun

    names = {name.partition(".")[0] for name in os.listdir(os.path.dirname(ddprun.__file__))}
    assert names.isdisjoint(sys.stdlib_module_names)


LEFT = """
import os, time

def children(pid):
    return [int(number) for number in open(f"/proc/{pid}/task/{pid}/children").read().split()]

server, end = children(os.getppid())[0], time.monotonic() + 20
assert "forkserver" in open(f"/proc/{server}/cmdline").read()
while (left := children(server)) and time.monotonic() < end:  # it still forks the others
    time.sleep(0.01)
os.write(1, f"left: {left}\\n".encode())  # a whole line: others write at the same time
"""


def test_no_process_between_the_fork_server_and_the_ranks_remains(launcher: Launcher) -> None:
    """No process between server and rank may remain: zombies would fill a pod's process limit."""
    script = launcher.script(LEFT)
    done = launcher.done("--preload=decimal", "--nproc-per-node=3", script)
    assert done.stdout.count("left: []") == 3, done.stdout


def test_a_rank_that_is_killed_right_after_its_fork_counts_as_ended(launcher: Launcher) -> None:
    """A rank that is killed right after its fork must count as ended, although its short-lived parent does not reap it.
    The agent would wait for a minute."""
    launcher.script(
        """
        import os, signal, time
        end, sleep = os._exit, time.sleep
        os._exit = lambda code: (sleep(0.5), end(code))  # of what is between the server and the rank
        time.sleep = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # of the rank, which waits for the end of that
        """,
        "hurried.py",
    )
    done = launcher.done("--preload=hurried", "--max-restarts", 0, launcher.script(""))
    assert "rank 0 was killed by SIGKILL;" in done.stderr, done.stderr

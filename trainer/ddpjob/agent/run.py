"""Puts an agent together from its parts, and runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ddpjob.agent import environment, processes
from ddpjob.agent.agent import Agent, Group, leave_message
from ddpjob.agent.logs import Folder
from ddpjob.agent.node import say
from ddpjob.agent.options import Options
from ddpjob.agent.preload import ForkServer
from ddpjob.agent.watch_ranks import Watching
from ddpjob.core.failures import EXCEPTION_MAX, Failure

USAGE = 2  # as argparse ends


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Do all that the options ask; the exit code."""
    if missing := _missing(options, environ):
        say(missing)
        found = Failure(exit_code=USAGE, exception=f"ddprun: {missing}"[:EXCEPTION_MAX])
        leave_message(environ.get("DDPJOB_TERMINATION_LOG"), found.as_dict())
        return USAGE
    processes.become_subreaper()
    processes.close_to_children()
    prepared = environment.prepare(options, environ)
    try:
        folder = Folder(options)
    except OSError as error:
        say(f"no folder for the ranks' files: {error.filename}: {error.strerror}. Name one: --log-dir, or TMPDIR.")
        return USAGE
    if folder.has_unseen:
        say(f"what the console does not show of the ranks' output is in {folder.path}")
    agent = Agent(options, prepared, folder, _fork_server(options, prepared))
    agent.watching, agent.group = Watching(agent), _group(agent)
    try:
        return agent.run()
    finally:
        agent.node.end()
        folder.remove()


def _missing(options: Options, environ: Mapping[str, str]) -> str:
    """A script or a module that is not there is not worth a restart. Only where this agent is alone: agents of other
    nodes would wait for one that has ended."""
    if options.nodes > 1:
        return ""
    if options.kind == "module":
        return _missing_module(options.script, environ)
    return _missing_script(options.script) if options.kind == "script" else ""


def _missing_script(script: str) -> str:
    if os.path.exists(script):
        return ""
    from difflib import get_close_matches  # only where it is needed: a job waits for imports

    folder, name = os.path.split(script)
    there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = get_close_matches(name, there, n=1)
    hint = f"; did you mean {os.path.join(folder, close[0])}?" if close else ""
    return f"there is no file {script} in {os.getcwd()}{hint}"


def _missing_module(name: str, environ: Mapping[str, str]) -> str:
    """As far as that is known without an import: of the first package, and of a file that is named instead."""
    stem = name.removesuffix(".py")
    path = f"{stem.replace('.', '/')}.py"
    if stem != name and os.path.isfile(path) and not os.path.isdir(path[:-3]):
        return f"there is no module {name}: -m takes {stem.replace('/', '.')}; without -m the file is {path}"
    top = name.partition(".")[0]
    # Another interpreter, or one with other flags, has modules of its own. A relative name is refused by Python.
    other = environ.get("PYTHON_EXEC") or sys.flags.ignore_environment or sys.flags.no_user_site
    if other or not top or _is_there(top):
        return ""
    return f"there is no module {top} in {os.getcwd()}, nor is one installed in {sys.executable}"


def _is_there(module: str) -> bool:
    """Whether `python -m` finds a module that is in no package; nothing is imported for that."""
    from importlib.util import find_spec

    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # something else than Python's own finders knows it
        return True
    finally:
        sys.path[:] = before


def _group(agent: Agent) -> Group:
    if agent.options.place == agent.options.members.leader:
        from ddpjob.agent.leader import Leader

        return Leader(agent)
    from ddpjob.agent.follower import Follower

    return Follower(agent)


def _fork_server(options: Options, environ: Mapping[str, str]) -> ForkServer | None:
    """Where there is something to import, and a script that can be run in it."""
    if not options.preload or options.kind == "program":
        return None
    if options.kind == "script" and not os.path.isfile(options.script):  # a folder, a zip, a mistake
        return None
    try:
        return ForkServer(options, environ)
    except OSError as error:
        say(f"no fork server: {error}; every rank is a new process")
        return None

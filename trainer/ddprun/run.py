"""Build an agent from its parts, and run it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from ddpjob_core.failures import Failure
from ddprun import environment, missing_script, processes
from ddprun.agent import Agent, Group, forget_message, leave_message
from ddprun.asking import Asking
from ddprun.logs import LogFolder
from ddprun.node import say
from ddprun.options import Options
from ddprun.preload import ForkServer
from ddprun.watch_ranks import Watching

USAGE = 2  # exit code for wrong options, as in argparse


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Run what the options request. Return the exit code."""
    forget_message(environ.get("DDPJOB_TERMINATION_LOG"))
    # Check only with one node. With several, node.py reports a missing script, because others wait for this agent.
    if options.nodes == 1 and (missing := missing_script.missing(options.script, environ)):
        say(missing)
        found = Failure(exit_code=USAGE, exception=missing_script.told(missing))
        leave_message(environ.get("DDPJOB_TERMINATION_LOG"), found.as_dict() | {"failed": True})
        return USAGE
    processes.become_subreaper()
    processes.close_to_children()
    prepared = environment.prepare(options, environ)
    try:
        folder = LogFolder(options)
    except OSError as error:
        say(f"no folder for the ranks' files: {error.filename}: {error.strerror}. Name one: --log-dir, or TMPDIR.")
        return USAGE
    if folder.has_unseen:
        say(f"the ranks' output that the console does not show is in {folder.path}")
    agent = Agent(options, prepared, folder, _fork_server(options, prepared))
    agent.watching, agent.group_of, asking = Watching(agent), partial(_group, agent), Asking(agent, agent.take_answer)
    # A pod that was created after another leader had been appointed first asks the operator who leads.
    if asking.is_possible and environ.get("DDPJOB_LEADER_APPOINTED") == "1":
        agent.leader = agent.leader._replace(term=0)
    agent.asking, agent.group = asking, agent.group_of(agent.is_appointed, -1)
    try:
        return agent.run()
    finally:
        agent.node.end()
        folder.remove()


def _group(agent: Agent, leads: bool, generation: int) -> Group:
    if leads:
        from ddprun.leader import Leader

        return Leader(agent, generation)
    from ddprun.follower import Follower

    return Follower(agent, generation)


def _fork_server(options: Options, environ: Mapping[str, str]) -> ForkServer | None:
    """Create the fork server, if there is something to import and the script can run in it."""
    script = options.script
    if not script.preload or script.kind == "program":
        return None
    if script.kind == "script" and not os.path.isfile(script.name):  # the script is a folder or a zip file, or missing
        return None
    try:
        return ForkServer(options, environ)
    except OSError as error:
        say(f"no fork server: {error}; every rank is a new process")
        return None

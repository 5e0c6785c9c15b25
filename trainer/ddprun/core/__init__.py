"""The decisions of an agent.

In:   events, heartbeats and reports of other agents, the time as a number.
Out:  orders and judgements, which the agents of node 0 and of the other nodes carry out.
Called by: leader.py, follower.py, node.py and the watchdog; parts of it by the command line.
Must not use I/O, a clock or processes, so that tests run hours of a job in milliseconds.
"""

"""Rules and formats that operator, local run, agents and library share. Results depend on the arguments alone.

An attempt is one set of pods of a job. A generation is one start of all ranks in these pods.

In:   numbers, texts and records of one job: budgets, beats, reports, members.
Out:  decisions (is this failure charged, is that rank stalled, which state counts) and records of fixed layout.

    failures, failure_policy, rules, budget   a failure as all parts write it; what it is charged to
    members, rank_info                        node, place, rank, leader
    heartbeat, stall_limits, findings         the layout of a heartbeat; how long silence may last; what is suspicious
    memory, copies                            which state in memory counts, who writes it, when it is copied

Called by: `ddpjob_operator`, `ddpjob_check`, `ddpjob_cli`, `ddprun`, `ddpjob`. Rules that two of them need are here.
Must not use: anything but the standard library; no I/O, no clock, no processes, no torch.
"""

"""The operator, and every decision about a DDPJob.

In:   DDPJobs, pods, nodes and reports, as the API server and the pods' agents show them.
Out:  Services, pods, events, the status of each DDPJob, metrics.

    kube/       the cluster: watches, asks plan(), carries out. The only room with kopf and I/O
      work/       a job's turn: queue, look up, plan, execute, tell
      watch/      lists and watches, and the store of what they showed
      ports/      what is listened on: reports, health, metrics
      api/        requests: client, errors, limits, rights
    metrics/    what is counted, and its text
    plan/       what to do next: sort, record, decide, finish (plan.py is one page)
    gangs/      gang schedulers and queues, a table each
    failures/   what a failure was: logs and termination messages read, the first cause found
    pods/       the objects that are created
    observed/   pods, nodes and reports as both shells see them
    job/        the DDPJob itself: types, validation, what follows from a spec and its command

Called by: `ddpjob-operator` (kube/program.py); all but kube/ also by the local run and the simulation.
Must not know: from metrics/ down no I/O, no clock, no kopf; all of it no `ddpjob_cli`, no `ddpjob`, no torch. It shares
`ddpjob_core` with the agents in the pods.
"""

"""The operator, and every decision about a DDPJob.

In:   DDPJobs, pods, nodes and reports, as the API server and the pods' agents show them.
Out:  Services, pods, events, the status of each DDPJob, metrics.

    kube/       the cluster: watches objects, calls plan(), carries out the plan. Only this folder uses kopf and I/O
      work/       reconciles jobs: queue, read, plan, execute, report
      watch/      lists and watches, and the store of their objects
      ports/      HTTP servers for reports, health and metrics
      api/        requests: client, errors, limits, rights
    metrics/    metrics and their text format
    plan/       what to do next: sort, record, decide, finish (plan.py is one page)
    gangs/      adapters for gang schedulers and queues
    failures/   reads logs and termination messages, and finds the first cause of a failure
    pods/       the objects that are created
    observed/   pods, nodes and reports, as the cluster and the local run observe them
    job/        the DDPJob itself: types, validation, what follows from a spec and its command

Called by: `ddpjob-operator` (kube/program.py); all but kube/ also by the local run and the simulation.
Must not import: `ddpjob_cli`, `ddpjob` or torch. From metrics/ down it must not use I/O, a clock or kopf either.
The operator shares `ddpjob_core` with the agents in the pods.
"""

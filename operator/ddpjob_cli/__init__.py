"""What a user starts: the command line `ddpjob`, the same from Python, the local run and the client of a cluster.

In:   words of a command line, files, a kubeconfig.
Out:  text, exit codes (2: the user's mistake), processes of this machine, objects in a cluster by the user's rights.

    sdk/        `ddpjob.run` and `ddpjob.submit`, which give a Job: thin users of what the commands call
    commands/   one function for each verb; where a job comes from (a YAML, a script, stdin); what is printed
    local/      a job as processes of this machine: run.py calls the operator's own plan() around them
      shown/      the table that lives, lines for a pipe, the use of the machine
      processes/  pods as processes: start, signals, faults, reports, stacks
      kept/       what a run leaves on the disk: folder, records, history, report, metrics
    client/     the same verbs for a cluster: submit with the code, watch, logs, stacks, suspend, delete
    manifest/   DDPJobs as files: YAML in bounds, errors with line and column, values of the command line
    describe/   a status as text for people

Called by: the console scripts `ddpjob` and `kubectl-ddp`; sdk/ by `ddpjob`, the library, by name.
Must not know: kopf, the operator's room `kube`, torch, `kubernetes`; urllib3 only once a command needs a cluster.
"""

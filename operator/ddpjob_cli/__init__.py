"""The command line `ddpjob`, its Python functions, the local run, and the client of a cluster.

In:   words of a command line, files, a kubeconfig.
Out:  text, exit codes (2: the user's mistake), processes on this machine, objects in a cluster with the user's rights.

    sdk/        `ddpjob.run` and `ddpjob.submit`, which return a Job; they call the same code as the commands
    commands/   one function for each verb; where a job comes from (a YAML, a script, stdin); what is printed
    local/      a job as processes of this machine: run.py calls the operator's own plan() around them
      shown/        the live table, lines for a pipe, the use of CPUs and GPUs
      processes/    pods as processes: started, signalled, watched; saved files, received reports, stacks
      preparation/  pods as commands: variables, GPUs, threads, terminal, faults
      run_files/    the files of a run: folder, records, history, report, metrics
    client/     the same verbs for a cluster: submit with the code, watch, logs, stacks, suspend, delete
    manifest/   DDPJobs as files: YAML of limited size, errors with line and column, values of the command line
    describe/   a status as text for people

Called by: the console scripts `ddpjob` and `kubectl-ddp`. The library `ddpjob` imports sdk/ by name on first use.
Must not import: kopf, the operator's package `kube`, torch, `kubernetes`; urllib3 only if a command needs a cluster.
"""

"""`python -m ddpjob_operator` is `ddpjob-operator`."""

from ddpjob_operator.kube.program import main

if __name__ == "__main__":
    main()

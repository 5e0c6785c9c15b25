"""`python -m ddpjob_operator` is `ddpjob-operator`."""

from ddpjob_operator.kube.main import main

if __name__ == "__main__":
    main()

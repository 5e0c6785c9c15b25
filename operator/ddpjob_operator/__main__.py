"""`python -m ddpjob_operator` is `ddpjob`."""

from ddpjob_operator.cli import main

main()

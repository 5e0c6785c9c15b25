"""`python -m ddpjob.agent`."""

from ddpjob.agent import main

main()

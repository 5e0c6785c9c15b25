"""`python -m ddpjob.agent`."""

from . import main

main()

"""`python -m ddprun`."""

from ddprun import main

main()

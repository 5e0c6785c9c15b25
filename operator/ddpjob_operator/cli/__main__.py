"""`python -m ddpjob_operator.cli`."""

from ddpjob_operator.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m ddpjob_cli`."""

from ddpjob_cli.commands.main import main

if __name__ == "__main__":
    main()

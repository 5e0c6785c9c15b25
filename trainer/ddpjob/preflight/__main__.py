"""`python -m ddpjob.preflight`, as every rank of a job."""

from ddpjob.preflight.measure import main

main()

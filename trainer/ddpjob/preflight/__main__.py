from ddpjob.preflight.measure import main

main()

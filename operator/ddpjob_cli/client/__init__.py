"""Jobs in a cluster, for the command line: by the user's kubeconfig and rights alone.

The `kubernetes` package reads the kubeconfig and gives credentials; it is imported when a command needs a cluster.
"""

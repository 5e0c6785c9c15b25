"""Jobs in a cluster, for the command line, with nothing but the user's kubeconfig and rights.

kubeconfig.py finds the API server and the credentials, connection.py sends requests with urllib3.
"""

"""Jobs in a cluster, for the command line: by the user's kubeconfig and rights alone.

kubeconfig.py finds the API server and the credentials, connection.py sends requests by urllib3.
"""

"""Requests to the API server: the client, how answers and errors are read, how many are in flight, what is allowed."""

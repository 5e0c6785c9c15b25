"""Lists and watches of the API server's objects, and the store that keeps the needed parts of them."""

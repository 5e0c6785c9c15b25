"""What the API server shows: lists and watches, and the store of all that is kept of them."""

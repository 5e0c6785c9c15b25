"""The state of a training: how it is copied from objects and restored, stored as bytes, and compared between ranks."""

"""The DDPJob resource: its types, what they allow, and what follows from a spec alone."""

"""The DDPJob resource: its types, the values that they allow, and facts that follow from a spec alone."""

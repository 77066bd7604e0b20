"""Graph passes, each named by its equation."""

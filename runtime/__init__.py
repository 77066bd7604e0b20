"""The runtime: loads an engine and serves it with in-flight batching. Imports neither torch nor the builder."""

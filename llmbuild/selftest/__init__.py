"""`llmbuild selftest`: a tiny model through build, load and steps of each target, as a report that can be sent."""

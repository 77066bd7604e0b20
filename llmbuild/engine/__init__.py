"""Engine directory: format, writing, loading checks."""

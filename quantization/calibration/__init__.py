"""What calibration finds out about the inputs of linears: observers, statistics, their file."""

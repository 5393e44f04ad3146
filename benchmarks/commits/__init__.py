"""Two commits of this package, measured in turns."""

"""Pictures of an analysis, one file each: a function that takes results and returns a figure."""

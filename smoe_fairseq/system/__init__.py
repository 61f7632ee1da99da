"""The bottom: errors, files, locks, memory. Needs Python's own library only, and nothing of this package."""

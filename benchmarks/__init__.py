"""Benchmarks; `make bench` runs them. A package, since one that fairscale installs has the same name."""

"""``smoe path``: where the package lies."""

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Takes no arguments."""


def run(args: Namespace) -> None:
    """Prints the folder that fairseq takes as ``--user-dir``."""
    print(Path(__file__).resolve().parent)

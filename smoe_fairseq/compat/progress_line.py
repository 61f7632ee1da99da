"""Keeps the routing metrics of each block and stratum off the console's lines.

For fairseq 0.12.2 on any Python. Its progress bars print every metric that its loggers get, and a
large model has a hundred of these. They are named by block, ``encoder.layer.1/...``; TensorBoard,
Weights & Biases and lines in JSON, which programs read, have them all.
"""

import functools
from types import ModuleType


def keep_lines_short(progress_bar: ModuleType) -> None:
    original = progress_bar.BaseProgressBar._format_stats

    @functools.wraps(original)
    def _format_stats(self, stats):
        shown = {key: stat for key, stat in stats.items() if not _is_of_one_block(key)}
        return original(self, shown)

    progress_bar.BaseProgressBar._format_stats = _format_stats


def _is_of_one_block(key: str) -> bool:
    return "/" in key and key.startswith(("encoder.", "decoder."))

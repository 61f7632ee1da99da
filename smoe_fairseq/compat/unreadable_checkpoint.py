"""One sentence for a checkpoint that cannot be read, where fairseq ends in torch's stack trace.

For fairseq 0.12.2 on any torch. A full disk or a killed process leaves such files; the user has to
know which one it is. A file with types that are not loaded for safety stays refused in torch's words.
"""

import functools
import zipfile
from types import ModuleType


def name_unreadable_checkpoints(checkpoint_utils: ModuleType) -> None:
    original = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path, *others, **options):
        try:
            return original(path, *others, **options)
        except FileNotFoundError:
            raise
        except (EOFError, OSError, RuntimeError, zipfile.BadZipFile):
            # SystemExit, since the trainer wraps every Exception in one of its own.
            raise SystemExit(
                f"error: {path} is cut off or not a checkpoint: resume from another one with "
                "--restore-file, or remove it to start anew"
            ) from None

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu

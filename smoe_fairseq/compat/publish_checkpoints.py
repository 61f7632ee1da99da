"""Keeps the old checkpoint until the new one is complete, whatever ends the run in between.

For fairseq 0.12.2 on any Python. It writes the first file of a save beside its place and renames it, but
copies that over ``checkpoint_last.pt`` and ``checkpoint_best.pt`` byte by byte: a run that is killed
meanwhile leaves half a file under the very name it would resume from. And a full disk ends in torch's
stack trace, after two more attempts in the same half-written file. Here every file is written beside
its place, brought to the disk and renamed, and what the system refuses is one sentence.
"""

import functools
import shutil
from types import ModuleType

from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_file


def publish_checkpoints(checkpoint_utils: ModuleType) -> None:
    paths, save = checkpoint_utils.PathManager, checkpoint_utils.torch_persistent_save

    class WholeFiles(paths):
        @staticmethod
        def copy(source, target, overwrite=False):
            if not paths.supports_rename(target):
                return paths.copy(source, target, overwrite)
            with whole_file(target) as partial:
                shutil.copyfile(source, partial)
            return target

    @functools.wraps(save)
    def torch_persistent_save(obj, filename, async_write=False):
        if async_write or not paths.supports_rename(filename):
            return save(obj, filename, async_write)
        with whole_file(filename) as partial, open(partial, "wb") as file:
            checkpoint_utils.torch.save(obj, file)

    checkpoint_utils.PathManager = WholeFiles
    checkpoint_utils.torch_persistent_save = torch_persistent_save


def name_unwritable_folder(checkpoint_utils: ModuleType) -> None:
    """One sentence, before the training, for a ``--save-dir`` that cannot be written to."""
    verify = checkpoint_utils.verify_checkpoint_directory

    @functools.wraps(verify)
    def verify_checkpoint_directory(save_dir):
        try:
            return verify(save_dir)
        except OSError as error:
            raise UsageError(
                f"--save-dir {save_dir} cannot be written to: {error.strerror}"
            ) from None

    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory

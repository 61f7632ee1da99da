"""fairseq 0.12.2, unmodified, on current Python, torch and numpy: every repair in one place.

A patch is one function in a file of its own, which says what it mends and why. It is called with
the module it mends as soon as that has been imported, so nothing heavy is loaded on its behalf.

The start-up hook loads this package without its parent. Write ``from .file import name`` in it:
``from . import file`` would import the parent.
"""

import warnings
from collections.abc import Sequence

from .bf16_device import keep_bf16_off_tpu
from .cached_dataset import read_past_cache
from .checkpoint_autocast import keep_autocast
from .cpu_ddp import name_no_gpu
from .cpu_overflow import skip_overflow_on_cpu
from .dataclass_hash import hash_dataclasses
from .encoder_fast_path import avoid_fast_path
from .fasta_index import index_without_shell
from .hidden_checkpoint import name_hidden_checkpoints
from .hydra_user_dir import import_user_dir_first
from .hydra_warnings import quiet_hydra
from .imports import Action, when_imported
from .literal_eval import EVALUATING, evaluate_literals_only
from .missing_language import name_missing_dictionary, name_unlisted_language
from .nan_detector import hook_forward_only
from .progress_line import keep_lines_short
from .publish_checkpoints import name_unwritable_folder, publish_checkpoints
from .safe_globals import allow_checkpoint_types
from .small_batches import name_too_small_batches
from .unreadable_checkpoint import name_unreadable_checkpoints
from .version import problem, require_fairseq

__all__ = ["PATCHES", "install", "require_fairseq", "when_imported"]

PATCHES = (
    ("dataclasses", hash_dataclasses),
    ("torch.serialization", allow_checkpoint_types),
    *((module, evaluate_literals_only) for module in EVALUATING),
    ("fairseq.dataclass.utils", quiet_hydra),
    ("fairseq.data.data_utils", name_too_small_batches),
    ("fairseq.data.indexed_dataset", read_past_cache),
    ("fairseq.data.fasta_dataset", index_without_shell),
    ("fairseq.logging.progress_bar", keep_lines_short),
    ("fairseq.trainer", skip_overflow_on_cpu),
    ("fairseq.nan_detector", hook_forward_only),
    ("fairseq.modules.checkpoint_activations", keep_autocast),
    ("fairseq.modules.transformer_layer", avoid_fast_path),
    ("fairseq.models.distributed_fairseq_model", name_no_gpu),
    ("fairseq.options", keep_bf16_off_tpu),
    ("fairseq.file_io", name_hidden_checkpoints),
    ("fairseq.checkpoint_utils", name_unreadable_checkpoints),
    ("fairseq.checkpoint_utils", publish_checkpoints),
    ("fairseq.checkpoint_utils", name_unwritable_folder),
    ("fairseq.data.dictionary", name_missing_dictionary),
    ("fairseq.data.multilingual.multilingual_data_manager", name_unlisted_language),
    ("fairseq.dataclass.initialize", import_user_dir_first),
)

_installed = False


def install(patches: Sequence[tuple[str, Action]] = PATCHES) -> None:
    """Installs the patches, once; where fairseq has another version, warns and leaves it alone."""
    global _installed
    if _installed:
        return
    _installed = True
    if sentence := problem():
        warnings.warn(sentence, stacklevel=2)
        return
    for module, patch in patches:
        when_imported(module, patch)

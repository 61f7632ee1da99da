"""The one layer over fairseq 0.12.2, which stays unmodified: all that is changed in it, and by what.

`MENDS` let it work on current Python, torch and numpy, for every fairseq command, with the plugin or
without. Each is one function in a file of its own here, which says what it mends and why. `ADDITIONS` are
what the plugin (``--user-dir``) brings: models, criterion, and what training does otherwise. They are where
they belong, and here only by name: nothing in this package imports what is above it (tests/test_layers.py).
Both are called with the module that they change as soon as it has been imported, so nothing heavy is loaded
on their behalf.

The start-up hook loads this package without its parent. Write ``from .file import name`` in it:
``from . import file`` would import the parent.
"""

import importlib
import warnings
from collections.abc import Sequence

from .bf16_device import keep_bf16_off_tpu
from .broadcast_state import send_plain_state
from .cached_dataset import read_past_cache
from .checkpoint_autocast import keep_autocast
from .command_errors import end_commands_with_sentence
from .cpu_ddp import name_no_gpu
from .cpu_overflow import skip_overflow_on_cpu
from .data_files import name_foreign_words, name_no_batches, name_unusable_files
from .dataclass_hash import hash_dataclasses
from .ema_integers import copy_integers
from .ema_missing import begin_average_at_model
from .encoder_fast_path import avoid_fast_path
from .fasta_index import index_without_shell
from .full_disk import name_full_disk
from .fully_sharded import find_group_of_one, refuse_fully_sharded_on_cpu
from .gathered_logs import gather_on_any_device
from .hidden_checkpoint import name_hidden_checkpoints
from .hydra_user_dir import import_user_dir_first
from .hydra_warnings import quiet_hydra
from .imports import Action, when_imported
from .jit_warning import quiet_jit
from .literal_eval import EVALUATING, evaluate_literals_only
from .loading_processes import end_loading_processes
from .missing_language import name_missing_dictionary, name_unlisted_language
from .multilingual_generator import take_prefix_function
from .nan_detector import hook_forward_only
from .numpy_long import keep_long
from .one_model_per_pair import name_other_models
from .option_values import name_bad_values
from .options_of_task import name_missing_options
from .progress_line import keep_lines_short
from .publish_checkpoints import name_unwritable_folder, publish_checkpoints
from .safe_globals import allow_checkpoint_types
from .small_batches import name_too_small_batches
from .uneven_validation import validate_uneven_shares
from .unknown_model import (
    name_unknown_model,
    name_unknown_model_to_resume,
    name_unknown_model_to_train,
)
from .unreadable_checkpoint import name_unreadable_checkpoints
from .unused_copies import leave_copies_alone
from .validation_task import take_task_of_checkpoint
from .version import is_installed, problem, require_fairseq
from .zero_sharding import leave_one_process_whole, name_missing_fairscale

__all__ = ["ADDITIONS", "MENDS", "install", "register", "require_fairseq", "when_imported"]

MENDS = (
    ("dataclasses", hash_dataclasses),
    ("torch.serialization", allow_checkpoint_types),
    ("torch.jit", quiet_jit),
    *((module, evaluate_literals_only) for module in EVALUATING),
    ("fairseq.distributed.utils", name_full_disk),
    ("fairseq.distributed.utils", end_commands_with_sentence),
    ("fairseq.distributed.utils", send_plain_state),
    ("fairseq.distributed.utils", name_bad_values),
    ("fairseq.distributed.utils", name_missing_fairscale),
    ("fairseq.distributed.utils", gather_on_any_device),
    ("fairseq.distributed.utils", refuse_fully_sharded_on_cpu),
    ("fairseq.distributed.fully_sharded_data_parallel", find_group_of_one),
    ("fairseq.dataclass.utils", quiet_hydra),
    ("fairseq.dataclass.utils", name_missing_options),
    ("fairseq.data.data_utils", name_too_small_batches),
    ("fairseq.data.indexed_dataset", read_past_cache),
    ("fairseq.data.indexed_dataset", name_unusable_files),
    ("fairseq.data.language_pair_dataset", name_foreign_words),
    ("fairseq.data.token_block_dataset", keep_long),
    ("fairseq.data.iterators", name_no_batches),
    ("fairseq.data.iterators", end_loading_processes),
    ("fairseq.data.fasta_dataset", index_without_shell),
    ("fairseq.logging.progress_bar", keep_lines_short),
    ("fairseq.trainer", skip_overflow_on_cpu),
    ("fairseq.trainer", name_unknown_model_to_resume),
    ("fairseq.trainer", begin_average_at_model),
    ("fairseq.nan_detector", hook_forward_only),
    ("fairseq.modules.checkpoint_activations", keep_autocast),
    ("fairseq.modules.transformer_layer", avoid_fast_path),
    ("fairseq.models.distributed_fairseq_model", name_no_gpu),
    ("fairseq.models.distributed_fairseq_model", leave_copies_alone),
    ("fairseq.options", keep_bf16_off_tpu),
    ("fairseq.options", take_task_of_checkpoint),
    ("fairseq.options", name_unknown_model_to_train),
    ("fairseq.models", name_unknown_model),
    ("fairseq.models.ema.ema", copy_integers),
    ("fairseq.file_io", name_hidden_checkpoints),
    ("fairseq.checkpoint_utils", name_unreadable_checkpoints),
    ("fairseq.checkpoint_utils", publish_checkpoints),
    ("fairseq.checkpoint_utils", name_unwritable_folder),
    ("fairseq.checkpoint_utils", validate_uneven_shares),
    ("fairseq.tasks.translation_multi_simple_epoch", take_prefix_function),
    ("fairseq.tasks.multilingual_translation", name_other_models),
    ("fairseq.optim.shard", leave_one_process_whole),
    ("fairseq.data.dictionary", name_missing_dictionary),
    ("fairseq.data.multilingual.multilingual_data_manager", name_unlisted_language),
    ("fairseq.dataclass.initialize", import_user_dir_first),
)

# Where the function is that is called with the module; without one, importing the place is all it takes.
ADDITIONS = (
    ("fairseq.criterions", "smoe_fairseq.criterions"),
    ("fairseq.models", "smoe_fairseq.models"),
    ("fairseq.utils", "smoe_fairseq.distributed.gradients:norm_over_all_experts"),
    ("fairseq.optim", "smoe_fairseq.distributed.zero:spread_shared_state"),
    (
        "fairseq.distributed.legacy_distributed_data_parallel",
        "smoe_fairseq.distributed.gradients:sum_over_replicas",
    ),
    ("fairseq.distributed.utils", "smoe_fairseq.distributed.start:start_together"),
    ("fairseq.distributed.utils", "smoe_fairseq.distributed.options:check_before_all"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.distributed.saving:save_sets"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.distributed.loading:load_sets"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.checkpoint.dictionaries:compare_when_loaded"),
    ("fairseq.checkpoint_utils", "smoe_fairseq.models.preflight:know_what_is_loaded"),
    ("fairseq.data.dictionary", "smoe_fairseq.checkpoint.dictionaries:remember_file"),
    ("fairseq.trainer", "smoe_fairseq.distributed.trainer:ask_for_ours"),
)

_installed = False


def install(mends: Sequence[tuple[str, Action]] = MENDS) -> None:
    """Installs the mends, once; where fairseq has another version, warns and leaves it alone."""
    global _installed
    if _installed:
        return
    _installed = True
    if sentence := problem():
        if is_installed():
            warnings.warn(sentence, stacklevel=2)
        return
    for module, mend in mends:
        when_imported(module, mend)


def register() -> None:
    """Installs the additions as soon as fairseq, of the right version, has been imported."""
    if problem() is None:
        when_imported("fairseq", _register)


def _register(fairseq) -> None:
    for module, place in ADDITIONS:
        when_imported(module, _addition(place))


def _addition(place: str) -> Action:
    module, _, name = place.partition(":")

    def add(of_fairseq) -> None:
        found = importlib.import_module(module)
        if name:
            getattr(found, name)(of_fairseq)

    return add

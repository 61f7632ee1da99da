"""All processes of a run have to do the same: asked once at the start, since afterwards they would wait.

A process with another ``--max-update`` or ``--update-freq`` stops making the collective calls that the
others make; one with another ``--lr`` trains another model without a word.
"""

from argparse import Namespace
from collections.abc import Mapping

from omegaconf import OmegaConf

from smoe_fairseq.checkpoint.dictionaries import noted
from smoe_fairseq.distributed.agree import from_all, several
from smoe_fairseq.system.errors import UsageErrorOfAll

# What may differ: who a process is, and where on its machine things are. Data is compared by its content.
OF_EACH = {
    *("distributed_rank", "device_id", "local_rank", "distributed_init_method", "distributed_port"),
    *("distributed_no_spawn", "distributed_num_procs", "nprocs_per_node", "checkpoint_suffix"),
    *("data", "user_dir", "log_file", "tensorboard_logdir", "plasma_path", "num_workers"),
    *("log_interval", "log_format", "no_progress_bar", "wandb_project", "aim_repo", "aim_run_hash"),
}


def check_flags(cfg, task) -> None:
    """Raise UsageErrorOfAll on all processes where one has other flags or dictionaries than the first."""
    if several():
        found = _settings(cfg)
        for name, dictionary in noted(task).items():
            found[f"the {name} dictionary"] = dictionary["sha256"][:12]
        for split, dataset in getattr(task, "datasets", {}).items():
            found |= _data(split, dataset)
        _compare(found)


def check_data(split: str, dataset) -> None:
    """The same for data that has been loaded since."""
    if several():
        _compare(_data(split, dataset))


def _settings(cfg) -> dict[str, str]:
    """All flags of fairseq's config, whose groups are configs or the older flat name spaces."""
    found = {}
    for group in cfg.values():
        if OmegaConf.is_config(group):
            group = OmegaConf.to_container(group)
        values = vars(group) if isinstance(group, Namespace) else group
        if isinstance(values, dict):
            for name, value in values.items():
                if name not in OF_EACH and not name.startswith("_"):
                    found.setdefault(f"--{name.replace('_', '-')}", str(value))
    return found


def _data(split: str, dataset) -> dict[str, str]:
    """Of a data set, or of each language pair's, as many sentences, and as many tokens in some of them."""
    parts = getattr(dataset, "datasets", None)
    if isinstance(
        parts, Mapping
    ):  # which together have an order only as they are divided into batches
        found = (_data(f"{split} ({name})", part) for name, part in parts.items())
        return {name: value for part in found for name, value in part.items()}
    number = len(dataset)
    some = [int(dataset.num_tokens(i)) for i in (0, number // 2, number - 1)] if number else []
    return {f"the data of {split}": f"{number} sentences (tokens of some: {some})"}


def _compare(own: dict[str, str]) -> None:
    first, *others = from_all(own)
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise UsageErrorOfAll(
                    f"process {rank} was started with {name} {other.get(name)}, and process 0 with "
                    f"{first.get(name)}: start all processes of a run alike"
                )

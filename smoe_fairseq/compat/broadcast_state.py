"""Lets a checkpoint that one process has read reach the others of its run.

For fairseq 0.12.2 on torch 2.6 and later. It sends the checkpoint's content as a pickle, which the others
read with ``torch.load``; there that refuses all types but plain ones ("Unsupported global:
omegaconf.dictconfig.DictConfig"), so that no run of several processes could be resumed. Here the config
travels as the plain dictionary that it was made of, and stays a config on both sides.
"""

import functools
from types import ModuleType

_CONFIG = "__config__"  # the one key of a dictionary that stands for a config


def send_plain_state(utils: ModuleType) -> None:
    import torch
    from omegaconf import OmegaConf

    # Where a tensor was: a number. The tensors are sent as such.
    torch.serialization.add_safe_globals([utils._TensorPlaceholder])
    original = utils._broadcast_object_slow

    def plain(value):
        if OmegaConf.is_config(value):
            return {_CONFIG: OmegaConf.to_container(value, enum_to_str=True)}
        return value

    def config(value):
        if isinstance(value, dict) and value.keys() == {_CONFIG}:
            made = OmegaConf.create(value[_CONFIG], flags={"allow_objects": True})
            OmegaConf.set_struct(made, True)
            return made
        return value

    @functools.wraps(original)
    def _broadcast_object_slow(obj, src_rank, group, dist_device):
        if utils.get_rank(group) == src_rank:
            original(_each(plain, obj), src_rank, group, dist_device)
            return obj
        return _each(config, original(None, src_rank, group, dist_device))

    utils._broadcast_object_slow = _broadcast_object_slow


def _each(change, value):
    """``value`` with ``change`` made to all that is in it, containers after what they hold."""
    if type(value) is dict:
        value = {key: _each(change, each) for key, each in value.items()}
    elif type(value) in (list, tuple):
        value = type(value)(_each(change, each) for each in value)
    return change(value)

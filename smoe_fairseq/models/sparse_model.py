"""What every model with stratified MoE layers does: how it is built, and how it takes a checkpoint."""

from collections.abc import Callable

from fairseq.data import Dictionary

from smoe_fairseq.models.config import DecoderOptions
from smoe_fairseq.models.hash_tables import hash_table
from smoe_fairseq.models.moe_layers import experts_of, placement_of
from smoe_fairseq.models.preflight import check_checkpoint, check_config, check_model
from smoe_fairseq.system.errors import UsageErrorOfAll


class SparseModel:
    """Before a model class of fairseq's, among the bases.

    Attributes:
        config_class: whose options the model takes.
    """

    config_class: type[DecoderOptions]

    @classmethod
    def add_args(cls, parser):
        cls.config_class.add_args(parser)

    @classmethod
    def built(cls, cfg, task, build: Callable, check: Callable):
        """The model that ``build(config, task)`` makes, of options that fit together.

        Args:
            check: what else than `check_config` has to hold, by ValueErrors.

        Raises:
            UsageErrorOfAll: the options do not fit together, or do not fit the task.
        """
        try:
            config = cls.config_class.of(cfg)
            check_config(config, task)
            check(config, task)
        except ValueError as error:
            raise UsageErrorOfAll(str(error)) from None
        model = build(config, task)
        if placement_of(model) is not None:
            check_model(config, task)
        return model

    def set_num_updates(self, num_updates):
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq does; one sentence where the checkpoint is of another architecture."""
        self.upgrade_state_dict(state_dict)
        self._take_own_experts(state_dict)
        if strict:
            check_checkpoint(self, state_dict)
        model_cfg = args if model_cfg is None else model_cfg  # as it was called before
        return super().load_state_dict(state_dict, strict, model_cfg)

    def _take_own_experts(self, state_dict):
        """Of a checkpoint with all experts (``--finetune-from-model``), a process takes its own."""
        for layer, experts in experts_of(self).items():
            place = experts.placement
            for own, parameter in experts.named_parameters():
                loaded = state_dict.get(name := f"{layer}.experts.{own}")
                if loaded is not None and len(loaded) == place.num_experts != len(parameter):
                    state_dict[name] = loaded[place.local.start : place.local.stop]


def with_experts(config: DecoderOptions, source: Dictionary, target: Dictionary):
    """fairseq's ``TransformerConfig``, each side with ``moe_freq`` and ``moe_options`` beside fairseq's.

    Args:
        source, target: of the tokens that encoder and decoder are given.

    Raises:
        UsageErrorOfAll: the dictionaries' counts do not do for a hash gate's table.
    """
    transformer = config.transformer()
    dictionaries = {"encoder": source, "decoder": target}
    for name in config.SIDES:
        side = getattr(transformer, name)
        side.moe_freq = config.moe_freq_of(name)
        side.moe_options = config.moe_options(name)
        if config.moe_gate == "hash":
            for options, strata in zip(side.moe_options, config.strata_of(name), strict=True):
                try:
                    table = hash_table(config, dictionaries[name], strata.num_experts)
                except ValueError as error:
                    raise UsageErrorOfAll(str(error)) from None
                options["hash_table"] = table
    return transformer

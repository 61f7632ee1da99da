"""The registered model, built from flags on the meta device: its shapes, and no memory for them."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import torch
from fairseq.data import Dictionary, TruncatedDictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY
from torch import nn

from smoe_fairseq.models.config import (
    DecoderOptions,
    SMoETransformerConfig,
    SMoETransformerLMConfig,
)
from smoe_fairseq.system.errors import UsageError

OF_TRANSLATION = ARCH_MODEL_INV_REGISTRY["smoe_transformer"]
OF_LANGUAGE = ARCH_MODEL_INV_REGISTRY["smoe_transformer_lm"]
ARCHITECTURES = [*OF_TRANSLATION, *OF_LANGUAGE]


def add_model_arguments(parser: ArgumentParser) -> None:
    """``--arch`` and the models' own flags, as fairseq-train has them; a language model takes some."""
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, default="smoe_transformer_base", help="default: base"
    )
    SMoETransformerConfig.add_args(parser.add_argument_group("model, as for fairseq-train"))


def parse_model(words: Sequence[str]) -> Namespace:
    """The model's part of a command line of fairseq-train; other flags are passed over."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    add_model_arguments(parser)
    return parser.parse_known_args(list(words))[0]


def is_language_model(args: Namespace) -> bool:
    """Whether ``--arch`` is of a model that has no encoder."""
    return args.arch in OF_LANGUAGE


def config_of(args: Namespace) -> DecoderOptions:
    """All options of the model of ``args``, those of its architecture where no flag is given."""
    return ARCH_MODEL_REGISTRY[args.arch].config_class.of(_complete(args))


def _complete(args: Namespace) -> Namespace:
    given = {name: value for name, value in vars(args).items() if value is not None}
    if is_language_model(args):
        for name in SMoETransformerLMConfig.of_translation():
            if given.get(name) is False and getattr(SMoETransformerConfig, name) is False:
                del given[name]  # a switch that nobody gave
    args = Namespace(**given)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


def build_meta_model(args: Namespace, vocabulary: int, outputs: int | None = None) -> nn.Module:
    """The model of ``args`` with one dictionary of ``vocabulary`` entries, special ones included.

    Args:
        outputs: entries that are predicted, where these are not all.

    Raises:
        UsageError: options make no model.
    """

    class Task:
        source_dictionary = target_dictionary = Dictionary()

    specials = len(Task.source_dictionary)
    if vocabulary <= specials:
        raise UsageError(
            f"--vocab-size {vocabulary}: expected more than the {specials} special tokens"
        )
    for i in range(vocabulary - specials):
        Task.source_dictionary.add_symbol(str(i))
    if outputs is not None:
        Task.target_dictionary = TruncatedDictionary(Task.source_dictionary, outputs)
    with torch.device("meta"):
        return ARCH_MODEL_REGISTRY[args.arch].build_model(_complete(args), Task)

"""The shorter way to fairseq's config (composing.py) against fairseq's own."""

import composing
import pytest
from fairseq import options
from fairseq.dataclass import utils
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

import smoe_fairseq.models  # noqa: F401  (as --user-dir does)

COMMANDS = {
    "training": "data --arch smoe_transformer_tiny --smoe-strata 4-0-4,2-6 --dropout 0 --optimizer adam "
    "--criterion smoe_label_smoothed_cross_entropy --lr 0.01 --lr-scheduler inverse_sqrt "
    "--adam-betas (0.9,0.98) --clip-norm 1 --fp16 --log-file it's --max-tokens 300 --eval-bleu",
    "several languages": "data --arch smoe_transformer_base --task translation_multi_simple_epoch "
    "--langs aa,bb --lang-pairs aa-bb --encoder-langtok tgt --sampling-temperature 5 --log-format json",
    "language model": "data --arch smoe_transformer_lm_tiny --task language_modeling --moe-gate hash "
    "--tokens-per-sample 9 --checkpoint-activations --optimizer nag",
    "stock": "data --arch transformer --share-all-embeddings "
    "--bpe sentencepiece --sentencepiece-model spm --save-dir a,b={c}",
}
GENERATION = "data --path a:b --beam 4 --max-len-b 10 --cpu --scoring chrf --remove-bpe"


def assert_same(found, want):
    assert type(found) is type(want)
    if hasattr(want, "_metadata"):
        assert found._metadata == want._metadata
    if hasattr(want, "items"):
        assert [*found.keys()] == [*want.keys()]
        for key in want:
            assert_same(found[key], want[key])
    else:
        assert found == want


@pytest.mark.parametrize("name", [*COMMANDS, "generation"])
def test_composed_as_by_hydra(monkeypatch, name):
    if name == "generation":
        parser = options.get_generation_parser(default_task="translation")
        args = options.parse_args_and_arch(parser, GENERATION.split())
    else:
        parser = options.get_training_parser()
        args = options.parse_args_and_arch(parser, COMMANDS[name].split())
    monkeypatch.setattr(utils, "compose", composing.compose_by_hydra)
    monkeypatch.setattr(utils, "initialize", composing.initialize_by_hydra)
    monkeypatch.setattr(utils, "OmegaConf", OmegaConf)
    want = utils.convert_namespace_to_omegaconf(args)
    monkeypatch.setattr(utils, "initialize", composing.initialize)
    monkeypatch.setattr(utils, "OmegaConf", composing.Values)
    monkeypatch.setattr(
        utils, "compose", lambda _, overrides, strict: composing.composed(overrides)
    )
    assert_same(utils.convert_namespace_to_omegaconf(args), want)


def test_what_hydra_refuses_is_refused():
    args = options.parse_args_and_arch(options.get_training_parser(), COMMANDS["stock"].split())
    args.log_format = "xml"
    with pytest.raises(ConfigCompositionException, match="common.log_format"):
        utils.convert_namespace_to_omegaconf(args)

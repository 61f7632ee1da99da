"""For ``torch.hub``: ``torch.hub.load(CHECKOUT, "smoe_transformer", RUN, source="local")``."""

dependencies = ["torch", "fairseq", "omegaconf", "sentencepiece"]


def smoe_transformer(run, **options):
    """A trained model that translates text; arguments as of `SMoETransformerModel.from_pretrained`."""
    from smoe_fairseq.models import SMoETransformerModel

    return SMoETransformerModel.from_pretrained(run, **options)


def smoe_transformer_lm(run, **options):
    """A trained language model; arguments as of `SMoETransformerLanguageModel.from_pretrained`."""
    from smoe_fairseq.models import SMoETransformerLanguageModel

    return SMoETransformerLanguageModel.from_pretrained(run, **options)

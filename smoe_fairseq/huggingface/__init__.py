"""Importing this registers the models of ``smoe export`` with the ``Auto*`` classes of transformers.

It needs torch, transformers and sentencepiece, but not fairseq.
"""

import warnings

import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from smoe_fairseq.huggingface.config import SMoEConfig
from smoe_fairseq.huggingface.model import SMoEForConditionalGeneration
from smoe_fairseq.huggingface.tokenizer import SMoETokenizer

TESTED = ("5.0", "6")  # the first is included, the second is not

if not Version(TESTED[0]) <= Version(transformers.__version__) < Version(TESTED[1]):
    warnings.warn(
        f"transformers {transformers.__version__} was not tested with smoe_fairseq.huggingface; "
        f"expected at least {TESTED[0]}, below {TESTED[1]}",
        stacklevel=2,
    )
AutoConfig.register(SMoEConfig.model_type, SMoEConfig, exist_ok=True)
AutoModelForSeq2SeqLM.register(SMoEConfig, SMoEForConditionalGeneration, exist_ok=True)
AutoTokenizer.register(SMoEConfig, slow_tokenizer_class=SMoETokenizer, exist_ok=True)

__all__ = ["SMoEConfig", "SMoEForConditionalGeneration", "SMoETokenizer"]

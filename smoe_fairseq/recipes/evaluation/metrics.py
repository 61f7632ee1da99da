"""sacreBLEU's metrics with its command's flags, and the tokenizer of each language."""

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Sequence

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import flag_of, refusing_flags
from smoe_fairseq.languages import bleu_tokenizer
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.program_flags import Flags, arguments

AUTO = "auto"  # value of `sacrebleu.tokenize`: by target language
DEFAULT = "13a"
_SCORING = ("metrics", "bleu_", "chrf_", "ter_", "confidence", "width")  # of which a score is made
_MODULES = {"ja-mecab": "MeCab", "ko-mecab": "mecab_ko"}  # of sacreBLEU's extras ja and ko


def tokenizer_of(settings: Flags, language: str) -> str:
    """The tokenizer of BLEU into a language: the data set's, unless that is `AUTO`."""
    own = str(settings.get("tokenize") or DEFAULT)
    return bleu_tokenizer(language) if own == AUTO else own


def flags_for(settings: Flags, language: str, metric: str) -> Flags:
    """sacreBLEU's flags for one of `scores.METRICS` into a language."""
    own, tokenizer = scores.METRICS[metric], tokenizer_of(settings, language)
    if not tokenizer.startswith("flores"):
        tokenizer = own.get("tokenize", tokenizer)
    return settings | own | {"tokenize": tokenizer}


def check_tokenizer(settings: Flags, language: str) -> None:
    """Raise UsageError if sacreBLEU does not know or need a flag, or lacks BLEU or the tokenizer."""
    chosen = tokenizer_of(settings, language)
    given, default = (vars(parsed(each)) for each in (settings | {"tokenize": chosen}, {}))
    if "bleu" not in given["metrics"]:
        raise UsageError(f"--metrics {' '.join(given['metrics'])}: expected bleu among them")
    for name in (n for n in given if not n.startswith(_SCORING) and given[n] != default[n]):
        raise UsageError(f"sacrebleu: {flag_of(name)} does not change a score; leave it out")
    if chosen in _MODULES and importlib.util.find_spec(_MODULES[chosen]) is None:
        advice = f"pip install 'sacrebleu[{chosen[:2]}]', or set `sacrebleu: {{tokenize: char}}`"
        raise UsageError(f"sacreBLEU's tokenizer {chosen} of {language} is not installed: {advice}")


def score(translations: Sequence[str], references: Sequence[str], settings: Flags) -> str:
    """The JSON that ``sacrebleu REFERENCES -i TRANSLATIONS`` prints.

    Raises UsageError for an unknown flag, or another number of translations than references.
    """
    if (made := len(translations)) != (expected := len(references)):
        raise UsageError(f"{made:,} translations and {expected:,} references: evaluate again")
    args, results = parsed(settings), []
    with quietly():
        for metric in metrics_of(args, references):
            samples = args.confidence_n if args.confidence else 1
            result = metric.corpus_score(list(translations), None, n_bootstrap=samples)
            signature = metric.get_signature().format(False)
            results.append(result.format(args.width, False, signature, True))
    return results[0] if len(results) == 1 else "[\n" + ",\n".join(results) + "\n]"


def metrics_of(args: Namespace, references: Sequence[str]) -> list:
    """sacreBLEU's metrics of `parsed` flags, by name."""
    from sacrebleu.metrics import METRICS
    from sacrebleu.utils import args_to_dict

    names = [name.lower() for name in sorted(args.metrics)]
    own = {name: args_to_dict(args, name, strip_prefix=True) for name in names}
    return [METRICS[name.upper()](references=[list(references)], **own[name]) for name in names]


def parsed(settings: Flags) -> Namespace:
    """sacreBLEU's flags, by its own function, which reads only ``sys.argv``."""
    from sacrebleu.sacrebleu import parse_args

    before, sys.argv = sys.argv, ["sacrebleu", "references", *arguments(settings)]
    try:
        with refusing_flags("sacrebleu: "):
            return parse_args()
    finally:
        sys.argv = before

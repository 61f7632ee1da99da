"""Validation by translations: chrF++ and BLEU of the first validation sentences of each direction.

``--validate-sentences N`` of the criterion enables it at each validation, with our own search. The means over
the directions are logged as ``valid_chrf`` and ``valid_bleu``; ``--best-checkpoint-metric chrf`` selects
checkpoints by them. Text is joined subwords, so the numbers only compare checkpoints of one run;
``smoe evaluate`` scores against the raw references.
"""

from collections.abc import Iterator

import numpy as np
import torch
from fairseq import utils
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.languages import bleu_tokenizer, is_unspaced
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.subwords import has_nmt_pieces, has_pieces
from smoe_fairseq.training import launch
from smoe_fairseq.translate.directions import is_multilingual, task_for
from smoe_fairseq.translate.readout import Readout
from smoe_fairseq.translate.search import BeamSearch, SearchOptions
from smoe_fairseq.translate.text import by_length

MAX_TOKENS = 4096  # of source in a batch, padding included


def score_by_translations(get_valid_stats, cfg, trainer, stats, tracking_best):
    """Add the scores to the numbers of fairseq's validation."""
    number = getattr(trainer.get_criterion(), "validate_sentences", 0)
    if number and tracking_best:
        stats = {**stats, **scores(trainer, number, trainer.get_criterion().validate_beam)}
    return get_valid_stats(cfg, trainer, stats, tracking_best)


def check(criterion, model) -> None:
    """Raise UsageError if a criterion needs translations, but our search does not support the model."""
    if getattr(criterion, "validate_sentences", 0) and not isinstance(model, SMoETransformerModel):
        kind = type(model).__name__
        raise UsageError(f"--validate-sentences: expected a translation model of ours, not {kind}")


@torch.no_grad()
def scores(trainer, number: int, beam: int) -> dict[str, float]:
    """``chrf`` and ``bleu``, means over the directions; a collective call of all ranks.

    Replicated ranks divide the batches among themselves. With sharded experts every rank translates all
    batches, so that all make the same collective calls.

    Args:
        number: of sentences of each direction.
    """
    task, model = trainer.task, trainer.get_model()
    ranks, rank = trainer.data_parallel_world_size, trainer.data_parallel_rank
    if trainer.expert_placement is not None:
        ranks, rank = 1, 0
    search = BeamSearch(task.target_dictionary, SearchOptions(beam=beam))
    model.eval()
    found: dict[str, list[float]] = {}
    subset = trainer.cfg.dataset.valid_subset.split(",")[0]
    for direction, batches in _batches(task, subset, number):
        directed, pairs = task_for(task, *direction), []
        for sample in batches[rank::ranks]:
            if trainer.cuda:
                sample = utils.move_to_cuda(sample)
            pairs += _texts(directed, sample, directed.inference_step(search, [model], sample))
        if ranks > 1:
            pairs = [pair for own in launch.all_gather(pairs) for pair in own]
        if not pairs:  # all sentences are too long
            continue
        texts, references = map(list, zip(*pairs, strict=True))
        with_ter = trainer.cfg.checkpoint.best_checkpoint_metric == "ter"
        for name, metric in _metrics(direction[1], with_ter).items():
            score = metric.corpus_score(texts, [references]).score
            found.setdefault(name, []).append(score)
    return {name: round(sum(scores) / len(scores), 3) for name, scores in found.items()}


def _metrics(language: str, with_ter: bool = False) -> dict:
    """sacreBLEU's metrics into a language; of its letters where it has no spaces, if MeCab is missing."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    tokenizer = bleu_tokenizer(language)
    try:
        bleu = BLEU(tokenize=tokenizer, force=True)
    except (ImportError, RuntimeError):
        bleu = BLEU(tokenize="char" if is_unspaced(language) else "13a", force=True)
    # TER takes longer than the translations.
    return {"chrf": CHRF(word_order=2), "bleu": bleu} | ({"ter": TER()} if with_ter else {})


def _batches(task, subset: str, number: int) -> Iterator[tuple[tuple[str, str], list[dict]]]:
    """Batches of the first sentences of each direction that fit the model."""
    if is_multilingual(task):
        loaded, _ = task.data_manager.load_split_datasets(subset, task.training, epoch=1)
        datasets = [(key.rpartition(":")[2].split("-"), dataset) for key, dataset in loaded]
    else:
        datasets = [((task.cfg.source_lang, task.cfg.target_lang), task.dataset(subset))]
    most_source, most_target = task.max_positions()
    for (source, target), dataset in datasets:
        sizes_N2 = np.asarray(dataset.sizes)
        fits_N = (sizes_N2 <= (most_source, most_target)).all(1)
        indices = np.flatnonzero(fits_N)[:number].tolist()
        batches = by_length(sizes_N2[indices, 0].tolist(), MAX_TOKENS)
        samples = [dataset.collater([dataset[indices[i]] for i in batch]) for batch in batches]
        yield (source, target), samples


def _texts(task, sample: dict, hypotheses: list) -> list[tuple[str, str]]:
    """Each translation and its reference; ``task`` is that of the direction."""
    dictionary, hidden = task.target_dictionary, Readout(None, (), task).hidden
    subwords = None
    if has_pieces(dictionary):
        subwords = "sentencepiece"
    elif has_nmt_pieces(dictionary):
        subwords = "subword_nmt"

    def text(ids: Tensor) -> str:
        ids = ids[ids != dictionary.pad()].int().cpu()
        return dictionary.string(ids, subwords, extra_symbols_to_ignore=hidden)

    pairs = zip(hypotheses, sample["target"], strict=True)
    return [(text(best["tokens"]), text(ids)) for (best, *_), ids in pairs]

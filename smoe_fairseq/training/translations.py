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
from fairseq.distributed import utils as distributed
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.languages import bleu_tokenizer, is_unspaced
from smoe_fairseq.models.transformer import SMoETransformerModel
from smoe_fairseq.subwords import has_nmt_pieces, has_pieces
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
    sums: list[dict[str, Tensor]] = []
    metrics = {}
    subset = trainer.cfg.dataset.valid_subset.split(",")[0]
    for direction, batches in _batches(task, subset, number):
        metrics = _metrics(direction[1], trainer.cfg.checkpoint.best_checkpoint_metric == "ter")
        totals = {name: torch.zeros(_SIZES[name], dtype=torch.float64) for name in metrics}
        directed = task_for(task, *direction)
        for sample in batches[rank::ranks]:
            if trainer.cuda:
                sample = utils.move_to_cuda(sample)
            hypotheses = directed.inference_step(search, [model], sample)
            texts, references = _texts(directed, sample, hypotheses)
            for name, metric in metrics.items():
                counts = metric._extract_corpus_statistics(texts, [references])
                totals[name] += torch.tensor(counts, dtype=torch.float64).sum(0)
        sums.append(totals)
    result = {}
    for name, metric in metrics.items():
        total_DN = torch.stack([totals[name] for totals in sums])
        if ranks > 1:
            total_DN = total_DN.to(trainer.device)
            distributed.all_reduce(total_DN, trainer.data_parallel_process_group)
        by_direction = [metric._compute_score_from_stats(row).score for row in total_DN.tolist()]
        result[name] = round(sum(by_direction) / len(by_direction), 3)
    return result


def _metrics(language: str, with_ter: bool = False) -> dict:
    """sacreBLEU's metrics into a language; of its letters where it has no spaces, if MeCab is missing."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    tokenizer = bleu_tokenizer(language)
    try:
        bleu = BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError):
        bleu = BLEU(tokenize="char" if is_unspaced(language) else "13a")
    # TER takes longer than the translations.
    return {"chrf": CHRF(word_order=2), "bleu": bleu} | ({"ter": TER()} if with_ter else {})


# Lengths of sacreBLEU's statistics: three counts for each of 6 orders of letters and 2 of words; matches and
# totals of 4 orders of words, and two lengths; edits and words of the reference.
_SIZES = {"chrf": 24, "bleu": 10, "ter": 2}


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


def _texts(task, sample: dict, hypotheses: list) -> tuple[list[str], list[str]]:
    """Translations and references; ``task`` is that of the direction."""
    dictionary, hidden = task.target_dictionary, Readout(None, (), task).hidden
    subwords = None
    if has_pieces(dictionary):
        subwords = "sentencepiece"
    elif has_nmt_pieces(dictionary):
        subwords = "subword_nmt"

    def text(ids: Tensor) -> str:
        ids = ids[ids != dictionary.pad()].int().cpu()
        return dictionary.string(ids, subwords, extra_symbols_to_ignore=hidden)

    translations = [text(best["tokens"]) for best, *_ in hypotheses]
    return translations, [text(ids) for ids in sample["target"]]

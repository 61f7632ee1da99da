"""Validation by translations: chrF++ and BLEU of the first validation sentences of each direction.

``--validate-sentences N`` of the criterion enables it at each validation, by our own search. The numbers are
logged as ``valid_chrf`` and ``valid_bleu``, means over the directions, and ``--best-checkpoint-metric chrf``
chooses checkpoints by them. Text is joined subwords, so the numbers only compare
checkpoints of one run; ``smoe evaluate`` scores against the raw references.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from smoe_fairseq.errors import UsageError
from smoe_fairseq.models.hub import has_pieces

MAX_TOKENS = 4096  # of source, padding included, that are translated at a time


def score_by_translations(get_valid_stats, cfg, trainer, stats, tracking_best):
    """Have fairseq-train add the scores to the numbers of a validation."""
    number = getattr(trainer.get_criterion(), "validate_sentences", 0)
    if number and tracking_best:
        stats = {**stats, **scores(trainer, number, trainer.get_criterion().validate_beam)}
    return get_valid_stats(cfg, trainer, stats, tracking_best)


def check(criterion, model) -> None:
    """Raise UsageError where a criterion asks for the translations of a model that our search lacks."""
    from smoe_fairseq.models.transformer import SMoETransformerModel

    if getattr(criterion, "validate_sentences", 0) and not isinstance(model, SMoETransformerModel):
        kind = type(model).__name__
        raise UsageError(f"--validate-sentences: expected a translation model of ours, not {kind}")


@torch.no_grad()
def scores(trainer, number: int, beam: int) -> dict[str, float]:
    """``chrf`` and ``bleu``, means over the directions; a collective call of all ranks.

    Replicated ranks divide the batches among themselves. With sharded experts every rank translates all of
    them, so that all make the same collective calls.

    Args:
        number: sentences of each direction.
    """
    from fairseq import utils
    from fairseq.distributed import utils as distributed
    from sacrebleu.metrics import BLEU, CHRF

    from smoe_fairseq.translate.search import BeamSearch, SearchOptions

    task, model = trainer.task, trainer.get_model()
    ranks, rank = trainer.data_parallel_world_size, trainer.data_parallel_rank
    if trainer.expert_placement is not None:
        ranks, rank = 1, 0
    metrics = {"chrf": CHRF(word_order=2), "bleu": BLEU()}
    search = BeamSearch(task.target_dictionary, SearchOptions(beam=beam))
    model.eval()
    sums: list[dict[str, Tensor]] = []
    subset = trainer.cfg.dataset.valid_subset.split(",")[0]
    for direction, batches in _batches(task, subset, number):
        totals = {name: torch.zeros(_SIZES[name], dtype=torch.float64) for name in metrics}
        with _turned_to(task, direction):
            for i, sample in enumerate(batches):
                if i % ranks != rank:
                    continue
                if trainer.cuda:
                    sample = utils.move_to_cuda(sample)
                found = task.inference_step(search, [model], sample)
                texts, references = _texts(task, direction, sample, found)
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
        found = [metric._compute_score_from_stats(row).score for row in total_DN.tolist()]
        result[name] = round(sum(found) / len(found), 3)
    return result


# Counts of a sentence: of six orders of letters and two of words; of four orders of words and two lengths.
_SIZES = {"chrf": 24, "bleu": 10}


def _batches(task, subset: str, number: int) -> Iterator[tuple[tuple[str, str], list[dict]]]:
    """The first sentences of each direction that fit the model, the longest first."""
    from smoe_fairseq.translate.translator import by_length

    if hasattr(task, "data_manager"):
        found, _ = task.data_manager.load_split_datasets(subset, task.training, epoch=1)
        named = [(key.rpartition(":")[2], dataset) for key, dataset in found]
    else:
        named = [(f"{task.cfg.source_lang}-{task.cfg.target_lang}", task.dataset(subset))]
    most_source, most_target = task.max_positions()
    for direction, dataset in named:
        fitting = (
            i
            for i in range(len(dataset))
            if dataset.src_sizes[i] <= most_source and dataset.tgt_sizes[i] <= most_target
        )
        chosen = [i for i, _ in zip(fitting, range(number), strict=False)]
        lengths = [int(dataset.src_sizes[i]) for i in chosen]
        batches = by_length(lengths, MAX_TOKENS)
        source, _, target = direction.partition("-")
        yield (
            (source, target),
            [dataset.collater([dataset[chosen[i]] for i in batch]) for batch in batches],
        )


@contextmanager
def _turned_to(task, direction: tuple[str, str]) -> Iterator[None]:
    """In this context the task translates in the direction; a multilingual one has none while it trains."""
    options = task.args if hasattr(task, "data_manager") else task.cfg
    before = options.source_lang, options.target_lang
    options.source_lang, options.target_lang = direction
    try:
        yield
    finally:
        options.source_lang, options.target_lang = before


def _texts(
    task, direction: tuple[str, str], sample: dict, found: list
) -> tuple[list[str], list[str]]:
    dictionary = task.target_dictionary
    unsaid = {dictionary.eos()}
    if hasattr(task, "data_manager") and (spec := task.args.langtoks["main"][1]):
        unsaid.add(task.data_manager.get_decoder_langtok(direction[1], spec))
    pieces = has_pieces(dictionary)
    words = any(symbol.endswith("@@") for symbol in dictionary.symbols)
    subwords = "sentencepiece" if pieces else "subword_nmt" if words else None

    def text(ids: Tensor) -> str:
        ids = ids[ids != dictionary.pad()].int().cpu()
        return dictionary.string(ids, subwords, extra_symbols_to_ignore=unsaid)

    return [text(each[0]["tokens"]) for each in found], [text(ids) for ids in sample["target"]]

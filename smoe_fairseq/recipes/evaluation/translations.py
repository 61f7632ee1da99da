"""Translate the raw text of test sets as ``smoe translate`` does, with the flags of ``fairseq-generate``.

On a CPU or one GPU this process translates; on a CPU, each thread has its own batch. On several GPUs, a
process on each translates one direction at a time.
"""

import ast
import multiprocessing
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import fields
from typing import TYPE_CHECKING

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import write_whole
from smoe_fairseq.flags import differing_flags, flag_of, values_of
from smoe_fairseq.host_memory import cores
from smoe_fairseq.journal import Journal
from smoe_fairseq.recipes.data.text_files import workers_for
from smoe_fairseq.recipes.evaluation.evaluation import UNFINISHED, Evaluation
from smoe_fairseq.recipes.evaluation.scores import lines_of
from smoe_fairseq.recipes.program_flags import arguments, flag_values, parse_flags
from smoe_fairseq.recipes.settings import Settings
from smoe_fairseq.recipes.training.launcher import plan_launch, visible_gpus

if TYPE_CHECKING:
    from smoe_fairseq.translate.readout import Translation

Hypotheses = list[tuple[float, str, list[float]]]  # score, text, and each token's, best first

# Generation options without effect on the search, or handled here.
_IGNORED = ("no_seed_provided", "sacrebleu", "no_beamable_mm")
# That only fairseq-generate has; with prefix_size, a model is given the beginnings of the references.
_UNREAD = ("bpe", "tokenizer", "scoring", "prefix_size")


def choose_devices(
    settings: Settings, directions: int, extra: Sequence[str]
) -> tuple[list[str], int]:
    """The GPU of each process; without GPUs, the threads of this process. Raises as `plan_launch`."""
    launch, jobs = plan_launch(settings, extra), settings.jobs
    if launch.cpu:
        import torch

        return [], jobs or min(torch.get_num_threads(), cores())
    gpus = visible_gpus(launch.gpus)
    count = min(directions, jobs or len(gpus))
    return [gpus[i % len(gpus)] for i in range(count)], 1


def translate_all(
    gpus: Sequence[str],
    threads: int,
    evaluation: Evaluation,
    directions: Sequence[str],
    done: Callable[[int], None],
) -> Iterator[str]:
    """Yield each direction as soon as it is translated; they start in the given order.

    ``gpus`` and ``threads`` are from `choose_devices`. ``done`` is called with the number of sentences of
    each batch; with several GPUs, of each direction.

    Raises:
        UsageError: an argument, the checkpoint or the data is invalid; or a process was killed.
    """
    if len(gpus) < 2:
        model = Model(evaluation, threads)
        for direction in directions:
            model.translate(direction, done)
            yield direction
        return
    queue = multiprocessing.get_context("spawn").Queue()
    for gpu in gpus:
        queue.put(gpu)
    with workers_for(_gpu_worker, queue, evaluation, count=len(gpus)) as submit:
        running = {submit(direction): direction for direction in directions}
        for future in as_completed(running):
            done(future.result())
            yield running[future]


def _gpu_worker(queue, evaluation: Evaluation) -> Callable[[str], int]:
    """A function that translates on a GPU from the queue and returns the number of sentences."""
    os.environ["CUDA_VISIBLE_DEVICES"] = queue.get()
    model = Model(evaluation, threads=1)

    def translate(direction: str) -> int:
        counts: list[int] = []
        model.translate(direction, counts.append)
        return sum(counts)

    return translate


class Model:
    """The model of a checkpoint, loaded with its first test set; a CPU has ``threads`` batches at once."""

    def __init__(self, evaluation: Evaluation, threads: int):
        self.evaluation, self.threads = evaluation, threads
        self.typed = flag_values([*arguments(evaluation.dataset.generate), *evaluation.extra])
        self.loaded = None

    def translate(self, direction: str, done: Callable[[int], None]) -> None:
        """Write the translations of a direction, one per line, and what ``fairseq-generate`` writes.

        Each sentence that is done is also in a `Journal`, with its number and `Hypotheses`.
        A sentence that is longer than the model accepts is divided. Models other than `SMoETransformerModel`
        use fairseq's search. Raises UsageError for an invalid argument or checkpoint.
        """
        evaluation, generated = self.evaluation, self.evaluation.generated(direction)
        files = evaluation.source(direction), evaluation.reference(direction)
        with quietly():
            cfg = parse_flags("fairseq-generate", evaluation.generation(direction))
            if self.loaded is None:
                self.loaded = self._load(cfg)
                evaluation.check_unchanged()
            options = _options(cfg, self.loaded.ours, self.typed)
            texts, references = map(lines_of, files)
            source, target = cfg.task.source_lang, cfg.task.target_lang
            generated.parent.mkdir(parents=True, exist_ok=True)
            with Journal(generated.with_name(UNFINISHED)) as journal:
                found: dict[int, Hypotheses] = dict(journal)
                done(len(found))

                def finish(number: int, translation: "Translation") -> None:
                    found[number] = [(h.score, h.text, h.scores) for h in translation.hypotheses]
                    journal.append((number, found[number]))
                    done(1)

                self.loaded.translate_batch(
                    texts, source, target, options, finish, known=frozenset(found)
                )
        lines = (
            line
            for number, row in enumerate(zip(texts, references, strict=True))
            for line in _generated(number, *row, found[number])
        )
        write_whole(generated, "".join(f"{line}\n" for line in lines))
        best = (found[number][0][1] for number in range(len(texts)))
        translations = "".join(f"{text}\n" for text in best)
        write_whole(evaluation.partial / f"{direction}.txt", translations)
        journal.finish()

    def _load(self, cfg):
        import torch
        from fairseq.utils import split_paths  # slow, and not needed for a dry run

        from smoe_fairseq.translate.directions import LANGUAGE_TOKENS
        from smoe_fairseq.translate.load import Translator
        from smoe_fairseq.translate.text import BatchTranslator

        overrides = ast.literal_eval(cfg.common_eval.model_overrides)
        data = split_paths(cfg.task.data)[0]
        try:
            translator = Translator.of_run(cfg.common_eval.path, data=data, **overrides)
        except UsageError as error:
            is_named = str(error).startswith(tuple(overrides))
            raise (UsageError(f"--model-overrides {error}") if is_named else error) from None
        saved, given = map(values_of, (translator.task.cfg or translator.task.args, cfg.task))
        names = {*LANGUAGE_TOKENS, "max_source_positions", "truncate_source"}
        both = sorted(names & saved.keys() & given.keys())
        read = {name: saved[name] for name in both if flag_of(name) in self.typed}
        for name, had in differing_flags(read, given).items():
            raise UsageError(f"{flag_of(name)}: the training had {had}; expected the same")
        translator.cfg.generation = cfg.generation  # for models that use fairseq's search
        if cfg.common.fp16:
            translator.half()
        if torch.cuda.is_available() and not cfg.common.cpu:
            translator.cuda()
        else:
            torch.set_num_threads(self.threads)
        sentences, tokens = cfg.dataset.batch_size, cfg.dataset.max_tokens
        if tokens is None:
            tokens = sys.maxsize if sentences else 12000  # as fairseq-generate does
        return BatchTranslator(translator, tokens * self.threads, max_sentences=sentences)


def _options(cfg, ours: bool, typed: Container[str]):
    """The flags of the search; raises UsageError for one that only fairseq-generate reads."""
    from fairseq.dataclass.configs import GenerationConfig

    from smoe_fairseq.translate.text import Options  # imports fairseq

    own = {field.name for field in fields(Options)} & vars(GenerationConfig()).keys()
    unread = [name for name in _UNREAD if flag_of(name) in typed]
    for name, default in vars(GenerationConfig()).items() if ours else ():
        given = getattr(cfg.generation, name, default)
        unread += [name] * (given != default and name not in own and name not in _IGNORED)
    if unread:
        raise UsageError(f"{flag_of(unread[0])}: only fairseq-generate (--dry-run) has it")
    has_seed = cfg.generation.sampling and cfg.common.seed is not None
    seed = {"seed": cfg.common.seed} if has_seed else {}
    values = {name: getattr(cfg.generation, name) for name in own}
    return Options(**values | seed, divide_above=sys.maxsize)


def _generated(number: int, source: str, reference: str, hypotheses: Hypotheses) -> Iterator[str]:
    """The lines of a sentence as ``fairseq-generate`` prints them; S and T are raw text."""
    yield f"S-{number}\t{source}"
    yield f"T-{number}\t{reference}"
    for score, text, scores in hypotheses:
        yield f"H-{number}\t{score}\t{text}"
        yield f"D-{number}\t{score}\t{text}"
        yield f"P-{number}\t{' '.join(f'{score:.4f}' for score in scores)}"

"""Translate test sets by our search, with the flags and in the format of ``fairseq-generate``.

On a CPU or one GPU this process translates; on a CPU, each thread has its own batch. On several GPUs, a
process on each translates one direction at a time.
"""

import ast
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, fields
from pathlib import Path

from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.files import read_text, whole_file
from smoe_fairseq.flags import flag_of
from smoe_fairseq.host_memory import cores
from smoe_fairseq.recipes.data.text_files import workers_for
from smoe_fairseq.recipes.processes import whole_number
from smoe_fairseq.recipes.program_flags import parse_flags
from smoe_fairseq.recipes.training.launcher import Launch, plan_launch, visible_gpus

# Generation options without effect on the search, or handled here.
_IGNORED = ("nbest", "prefix_size", "no_seed_provided", "sacrebleu", "no_beamable_mm")


@dataclass(frozen=True)
class Devices:
    """``gpus`` with a process each; without any, ``threads`` of this process."""

    gpus: tuple[str, ...]
    threads: int

    def __str__(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)}"
        return f"the CPU, {self.threads} thread{'s' * (self.threads > 1)}"


def check_launch(extra: Sequence[str]) -> tuple[Launch, int | None]:
    """What ``GPUS``, ``JOBS`` and the user's flags ask for; raises as `plan_launch`."""
    return plan_launch(extra), whole_number("JOBS", least=1)


def choose_devices(directions: int, extra: Sequence[str]) -> Devices:
    """The devices for a number of directions; raises as `check_launch`."""
    launch, jobs = check_launch(extra)
    if launch.cpu:
        import torch

        return Devices((), jobs or min(torch.get_num_threads(), cores()))
    gpus = visible_gpus(launch.gpus)
    count = min(directions, jobs or len(gpus))
    return Devices(tuple(gpus[i % len(gpus)] for i in range(count)), 1)


def translate_all(
    devices: Devices, jobs: Mapping[str, Sequence[str]], done: Callable[[int], None]
) -> Iterator[str]:
    """Yield each direction as soon as it is translated.

    Args:
        jobs: the arguments of ``fairseq-generate`` by direction, in the order in which to start them.
        done: called with the number of sentences of each batch; with several GPUs, of each direction.

    Raises:
        UsageError: an argument, the checkpoint or the data is invalid; or a process was killed.
    """
    if len(devices.gpus) < 2:
        generator = Generator(devices.threads)
        for direction, words in jobs.items():
            generator.translate(words, done)
            yield direction
        return
    queue = multiprocessing.get_context("spawn").Queue()
    for gpu in devices.gpus:
        queue.put(gpu)
    with workers_for(_gpu_worker, queue, count=len(devices.gpus)) as submit:
        running = {submit(words): direction for direction, words in jobs.items()}
        for future in as_completed(running):
            done(future.result())
            yield running[future]


def _gpu_worker(queue) -> Callable[[Sequence[str]], int]:
    """A function that translates on a GPU from the queue and returns the number of sentences."""
    os.environ["CUDA_VISIBLE_DEVICES"] = queue.get()
    generator = Generator(threads=1)

    def translate(words: Sequence[str]) -> int:
        counts: list[int] = []
        generator.translate(words, counts.append)
        return sum(counts)

    return translate


class Generator:
    """Translates test sets; a model is loaded once.

    Args:
        threads: number of batches in parallel on a CPU.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self.loaded = None

    def translate(self, words: Sequence[str], done: Callable[[int], None]) -> None:
        """Do what ``fairseq-generate WORDS`` does with ``--results-path``.

        The file contains the lines S, T, H, D and P. Models other than `SMoETransformerModel` use fairseq's
        search. Raises UsageError for an invalid argument, checkpoint or data set.
        """
        with quietly():
            from fairseq import tasks, utils

            cfg = parse_flags("fairseq-generate", words)
            if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
                cfg.dataset.max_tokens = 12000  # as fairseq-generate does
            task = tasks.setup_task(cfg.task)
            models, saved = self._models(cfg, task)
            subset = cfg.dataset.gen_subset
            task.load_dataset(subset, task_cfg=saved.task)
            batches = task.get_batch_iterator(
                dataset=task.dataset(subset),
                max_tokens=cfg.dataset.max_tokens,
                max_sentences=cfg.dataset.batch_size,
                max_positions=utils.resolve_max_positions(
                    task.max_positions(), *[model.max_positions() for model in models]
                ),
                ignore_invalid_inputs=cfg.dataset.skip_invalid_size_inputs_valid_test,
                required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
                seed=cfg.common.seed,
            ).next_epoch_itr(shuffle=False)
            output = Path(cfg.common_eval.results_path) / f"generate-{subset}.txt"
            output.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(output) as partial, open(partial, "w", encoding="utf-8") as file:
                for lines in self._search(cfg, task, models, batches):
                    file.writelines(lines)
                    done(sum(line.startswith("S-") for line in lines))

    def _models(self, cfg, task):
        """The models and their saved config; restores the task's state from when they were loaded."""
        import torch
        from fairseq import checkpoint_utils, utils

        from smoe_fairseq.translate.packed import can_pack, pack

        if self.loaded is None:
            models, saved = checkpoint_utils.load_model_ensemble(
                utils.split_paths(cfg.common_eval.path),
                arg_overrides=ast.literal_eval(cfg.common_eval.model_overrides),
                task=task,
                suffix=cfg.checkpoint.checkpoint_suffix,
                strict=cfg.checkpoint.checkpoint_shard_count == 1,
                num_shards=cfg.checkpoint.checkpoint_shard_count,
            )
            self.on_gpu = torch.cuda.is_available() and not cfg.common.cpu
            for model in models:
                if cfg.common.fp16:
                    model.half()
                model.prepare_for_inference_(cfg)
                if self.on_gpu:
                    model.cuda()
                elif _is_ours(models) and not cfg.common.fp16 and can_pack():
                    pack(model)
            self.loaded = models, saved, task.state_dict()
        models, saved, state = self.loaded
        task.load_state_dict(state)
        return models, saved

    def _search(self, cfg, task, models, batches) -> Iterator[list[str]]:
        """The lines of each batch, in the order of the batches."""
        import torch
        from fairseq import utils

        from smoe_fairseq.translate.text import in_threads

        search = original = task.build_generator(models, cfg.generation)
        threads = 0
        if _is_ours(models):
            search = _build_search(cfg, task.target_dictionary)
            threads = 0 if self.on_gpu else self.threads
        ignored = getattr(original, "symbols_to_strip_from_output", {original.eos})
        format_lines = _Lines(cfg, task, ignored)
        if cfg.common.seed is not None:
            utils.set_torch_seed(cfg.common.seed)

        def translate(sample: dict) -> list[str]:
            if not sample:
                return []
            sample = utils.move_to_cuda(sample) if self.on_gpu else sample
            size = cfg.generation.prefix_size
            prefix = sample["target"][:, :size] if size > 0 else None
            with torch.inference_mode():
                hypotheses = task.inference_step(search, models, sample, prefix_tokens=prefix)
            return format_lines(sample, hypotheses)

        stop = search.stop if threads > 1 else None
        yield from in_threads(translate, batches, threads, stop)


def _is_ours(models: Sequence) -> bool:
    from smoe_fairseq.models.transformer import SMoETransformerModel

    return len(models) == 1 and isinstance(models[0], SMoETransformerModel)


def _build_search(cfg, dictionary):
    """Our search with the flags; raises UsageError for a flag that only fairseq's search supports."""
    from fairseq.dataclass.configs import GenerationConfig

    from smoe_fairseq.translate.search import BeamSearch, SearchOptions

    own = {field.name for field in fields(SearchOptions)}
    defaults = GenerationConfig()
    for field in fields(GenerationConfig):
        name = field.name
        if name in own or name in _IGNORED or name.startswith("_"):
            continue
        if getattr(cfg.generation, name) != getattr(defaults, name):
            flag, advice = flag_of(name), "DRY_RUN=1 prints its command"
            raise UsageError(f"{flag}: only fairseq-generate's search has it; {advice}")
    options = {name: getattr(cfg.generation, name) for name in own if hasattr(cfg.generation, name)}
    seed = {} if cfg.common.seed is None else {"seed": cfg.common.seed}
    return BeamSearch(dictionary, SearchOptions(**options, **seed))


def best_translations(generated: Path) -> list[str]:
    """The best translations in a file of ``fairseq-generate``, in the order of the sentences."""
    translations = {}
    for line in read_text(generated).split("\n"):
        if line.startswith("D-"):
            number, _, text = line[2:].split("\t", 2)
            translations.setdefault(int(number), text)
    return [translations[number] for number in sorted(translations)]


class _Lines:
    """Formats a batch as ``fairseq-generate`` prints it, without the ``ignored`` symbols."""

    def __init__(self, cfg, task, ignored: set[int]):
        self.source, self.target = task.source_dictionary, task.target_dictionary
        self.ignored, self.nbest = ignored, cfg.generation.nbest
        self.subwords = cfg.common_eval.post_process
        decoders = task.build_bpe(cfg.bpe), task.build_tokenizer(cfg.tokenizer)
        self.decoders = [each.decode for each in decoders if each is not None]

    def __call__(self, sample: dict, hypotheses: list[list[dict]]) -> list[str]:
        rows = enumerate(zip(sample["id"].tolist(), hypotheses, strict=True))
        return [line for row, pair in rows for line in self._sentence_lines(sample, row, *pair)]

    def _sentence_lines(
        self, sample: dict, row: int, number: int, hypotheses: list[dict]
    ) -> Iterator[str]:
        import torch

        source = self._unpadded(sample["net_input"]["src_tokens"][row])
        yield f"S-{number}\t{self._decoded(self.source.string(source, self.subwords))}\n"
        if sample["target"] is not None:
            target = self._unpadded(sample["target"][row])
            options = {"escape_unk": True, "extra_symbols_to_ignore": self.ignored}
            yield f"T-{number}\t{self._decoded(self.target.string(target, self.subwords, **options))}\n"
        for hypothesis in hypotheses[: self.nbest]:
            tokens, ignored = hypothesis["tokens"].int().cpu(), self.ignored
            words = self.target.string(tokens, self.subwords, extra_symbols_to_ignore=ignored)
            # To base 2, and in float32, as fairseq prints it.
            score = float(torch.as_tensor(hypothesis["score"], dtype=torch.float32) / math.log(2))
            parts = (hypothesis["positional_scores"] / math.log(2)).tolist()
            yield f"H-{number}\t{score}\t{words}\n"
            yield f"D-{number}\t{score}\t{self._decoded(words)}\n"
            yield f"P-{number}\t{' '.join(f'{part:.4f}' for part in parts)}\n"

    def _unpadded(self, ids):
        return ids[ids != self.target.pad()].int().cpu()

    def _decoded(self, words: str) -> str:
        for decode in self.decoders:
            words = decode(words)
        return words

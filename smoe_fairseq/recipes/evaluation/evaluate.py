"""``scripts/evaluate.sh``: translate the test sets and score them with sacreBLEU."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from smoe_fairseq import locks
from smoe_fairseq.checkpoints.content import fingerprint
from smoe_fairseq.errors import UsageError, quietly
from smoe_fairseq.flags import flag_of
from smoe_fairseq.progress import progress
from smoe_fairseq.recipes import pretrained
from smoe_fairseq.recipes.commands import Step
from smoe_fairseq.recipes.data.raw import check
from smoe_fairseq.recipes.data.text_files import count_lines
from smoe_fairseq.recipes.datasets import Dataset, naming_settings
from smoe_fairseq.recipes.evaluation import metrics, scores, translations
from smoe_fairseq.recipes.evaluation.evaluation import Evaluation
from smoe_fairseq.recipes.evaluation.external import External, externals_of
from smoe_fairseq.recipes.folders import (
    Folders,
    checkpoint_file,
    fingerprints,
    run_method,
    run_name,
    run_seed,
    seed_of,
    whole_checkpoint,
)
from smoe_fairseq.recipes.methods import PRETRAINED, method_flags
from smoe_fairseq.recipes.processes import command, run, warn
from smoe_fairseq.recipes.program_flags import RECIPE_FLAGS, arguments, flag_values, words_of
from smoe_fairseq.recipes.training import identity
from smoe_fairseq.recipes.training.launcher import plan_launch


def again(dataset: Dataset, run: str) -> str:
    """The advice to score a run again, by the same checkpoint."""
    seed, which = run_seed(run), ""
    advice = f"run scripts/evaluate.sh {dataset.name} {run_method(run)}"
    advice += f" --seed {seed}" if seed is not None else ""
    with suppress(UsageError):  # not scored
        which, _ = scores.checkpoint_of(Folders(dataset).runs / run)
    is_other = run != PRETRAINED and which not in ("", dataset.checkpoint)
    return f"{advice} --checkpoint {which}" if is_other else advice


def state_notes(dataset: Dataset, run: str) -> list[str]:
    """Notes on a run that is not what its folder's name says, or has changed since it was scored."""
    folders, notes, seed = Folders(dataset), [], run_seed(run, dataset)
    if folders.binary.exists():  # else the dictionaries are unknown
        try:
            identity.check(folders.runs / run, run_method(run), seed, folders.binary)
        except UsageError as error:
            notes.append(f"{run}: {error}")
    return [*notes, *outdated_notes(dataset, run)]


def outdated_notes(dataset: Dataset, run: str) -> list[str]:
    """Notes on a run whose checkpoint has changed since it was scored, or that began from another model."""
    folder, notes = Folders(dataset).runs / run, []
    start = identity.start_of(folder)
    if start and dataset.start and start != dataset.start["fingerprint"]:
        model = Folders(dataset).binary / pretrained.MODEL
        notes.append(f"{run}: it began from another model than {model} is now")
    with suppress(UsageError, OSError):  # not scored, or its checkpoints are gone
        which, contents = scores.checkpoint_of(folder)
        before = run == PRETRAINED
        now = _pretrained(dataset) if before else fingerprints(folder, which)
        if contents and contents != now:
            file = pretrained.MODEL if before else checkpoint_file(folder, which).name
            other = f"{file} is another one than was scored"
            notes.append(f"{run}: {other}: {again(dataset, run)}")
    return notes


def evaluate(dataset: Dataset, method: str, flags: Sequence[str], checkpoint: str = "") -> None:
    """Translate and score every direction that has test data, and write ``scores.json``.

    ``flags`` are of ``fairseq-generate``; a dry run prints equivalent commands.

    Raises:
        UsageError: the method is unknown, its checkpoint or the test text is missing, a flag or a file is
            invalid, or another process evaluates this run.
    """
    settings = dataset.settings
    evaluation = plan(dataset, method, flags, checkpoint or dataset.checkpoint)
    if dataset.start and method != PRETRAINED:
        _evaluate_pretrained(dataset, flags)
    externals = externals_of(dataset)
    for direction in sorted({*dataset.all_directions} - {*evaluation.directions}):
        warn(f"{direction} has no test data in {Folders(dataset).raw} and is left out")
    with naming_settings(dataset, ["sacrebleu"]):
        for language in {direction.split("-")[1] for direction in evaluation.directions}:
            metrics.check_tokenizer(dataset.sacrebleu, language)
    run(evaluation.preparation, settings)
    tokenizer = str(dataset.sacrebleu.get("tokenize", ""))
    if tokenizer.startswith("flores"):
        comment = f"# the model of sacreBLEU's {tokenizer} tokenizer, which is fetched once"
        run([comment, Step("tokenizer", tokenizer)], settings)
    if settings.dry_run:
        _ = plan_launch(settings, flags), settings.jobs  # raise UsageError
        for direction in evaluation.directions:
            generation = command("fairseq-generate", *evaluation.generation(direction))
            comment = f"# {dataset.name} {direction}: translate and score"
            run([comment, generation, *evaluation.scoring(direction)], settings)
    else:
        print(f"# {dataset.name} {method}: translate and score", flush=True)
        with naming_settings(dataset, ("generate", "task"), flags):
            _translate(evaluation)
    for metric in externals:
        _score_by(evaluation, metric)


def _evaluate_pretrained(dataset: Dataset, flags: Sequence[str]) -> None:
    """Score the model before any update, unless that is done."""
    folder = Folders(dataset).runs / PRETRAINED
    is_scored = (folder / scores.FILE).exists()
    if not is_scored or scores.checkpoint_of(folder)[1] not in ({}, _pretrained(dataset)):
        with suppress(locks.InUse):  # another run's evaluation does it
            evaluate(dataset, PRETRAINED, flags)


def _pretrained(dataset: Dataset) -> dict[str, str]:
    """The fingerprint of the model that the data set fine-tunes, by its name."""
    return {pretrained.MODEL: fingerprint(Folders(dataset).binary / pretrained.MODEL)}


def plan(dataset: Dataset, method: str, flags: Sequence[str], which: str) -> Evaluation:
    """The evaluation of a method's run with the seed ``SEED``; ``which`` is the checkpoint.

    The method ``pretrained`` is the model that the data set fine-tunes, before any update.
    """
    method_flags(method, dataset)  # raises for an unknown method
    before = method == PRETRAINED
    given = flag_values([*arguments(dataset.generate), *flags])
    for flag in {f"--{name}" for name in RECIPE_FLAGS} & given.keys():
        raise UsageError(f"{flag} is set by the recipe; `smoe translate` translates other text")
    for flag in ("--remove-bpe", "--post-process"):
        if (value := given.get(flag, "sentencepiece")) != "sentencepiece":
            raise UsageError(f"{flag} {value}: expected sentencepiece, as words are scored")
    folders = Folders(dataset)
    folder = folders.runs / (method if before else run_name(dataset, method))
    checkpoint, preparation = folders.binary / pretrained.MODEL, ()
    if not before:
        checkpoint, preparation = whole_checkpoint(folder, which)
    if not dataset.settings.dry_run and not preparation and not checkpoint.exists():
        seed = f" --seed {seed_of(dataset)}" * (folder.name != method)
        advice = f"run scripts/train.sh {dataset.name} {method}{seed}"
        if any(folder.glob("checkpoint_last*.pt")):
            advice = "give --checkpoint last for the last one"
            try:
                locks.check_free(folder)
            except locks.InUse:
                advice = f"training still runs: wait, or {advice}"
        raise UsageError(f"{checkpoint} is missing: {advice}")
    if not dataset.settings.dry_run and not before:
        identity.check(folder, method, seed_of(dataset), folders.binary)
    directions = _directions(dataset, folders.raw)
    contents = {}
    if not dataset.settings.dry_run:
        contents = _pretrained(dataset) if before else fingerprints(folder, which)
    return Evaluation(dataset, folder, checkpoint, directions, tuple(flags), preparation, contents)


def _directions(dataset: Dataset, raw: Path) -> tuple[str, ...]:
    if not raw.exists():
        if dataset.settings.dry_run:
            return dataset.all_directions
        raise UsageError(f"{raw} is missing: run scripts/prepare.sh {dataset.name} first")
    tested = check(dataset, raw, needed=())
    directions = tuple(d for d in dataset.all_directions if dataset.pair_of(d) in tested)
    if not directions:
        pair = dataset.pairs[0]
        raise UsageError(f"{raw} has no test data (test.{pair}.{pair.split('-')[0]} and so on)")
    return directions


def _score_by(evaluation: Evaluation, metric: External) -> None:
    settings, done = evaluation.dataset.settings, evaluation.complete
    texts = {
        d: (evaluation.source(d), done / f"{d}.txt", evaluation.reference(d))
        for d in evaluation.directions
    }
    if settings.dry_run:
        name = metric.name.lower()
        lines = (metric.command(each, done / f"{d}.{name}.json") for d, each in texts.items())
        run([f"# {metric.name}, a number per line", *lines], settings)
        return
    metric.score(texts, done, settings)
    scored = evaluation.scored(done)
    evaluation.save(scored, evaluation.folder)
    for direction, score in scored.items():
        print(f"# {direction}: {metric.name} {score.others[metric.name][0]:.2f}", flush=True)


def _translate(evaluation: Evaluation) -> None:
    """Translate and score the directions that are not done, the longest test set first."""
    evaluation.folder.mkdir(parents=True, exist_ok=True)  # that of PRETRAINED may be missing
    locks.lock_folder(evaluation.folder, locks.EVALUATION)
    scored = evaluation.resume()
    for direction, score in scored.items():
        print(f"# {direction}: {score} (translated before)", flush=True)
    left = [direction for direction in evaluation.directions if direction not in scored]
    if left:
        _check_model(evaluation)
        left.sort(key=lambda d: -evaluation.source(d).stat().st_size)
        lines = {d: count_lines(evaluation.source(d)) for d in left}
        for direction, count in lines.items():
            reference = evaluation.reference(direction)
            if (other := count_lines(reference)) != count:
                expected = f"expected as many as in {evaluation.source(direction)}, {count:,}"
                raise UsageError(f"{reference} has {other:,} lines; {expected}")
        count = len(evaluation.directions)
        settings = evaluation.dataset.settings
        gpus, threads = translations.choose_devices(settings, len(left), evaluation.extra)
        place = f"GPU {', '.join(gpus)}" if gpus else f"the CPU (threads: {threads})"
        print(f"# {len(left)} of {count} directions on {place}, the longest first", flush=True)
        try:
            with progress("evaluate", sum(lines.values()), "sentences") as advance:
                translated = translations.translate_all(gpus, threads, evaluation, left, advance)
                for direction in translated:
                    scored[direction] = _score(evaluation, direction)
                    evaluation.save(scored, evaluation.partial)
                    with tqdm.external_write_mode(sys.stdout):
                        done = f"({len(scored)} of {count})"
                        print(f"# {direction}: {scored[direction]} {done}", flush=True)
        except SystemExit:  # a signal
            ended = f"# ended: {len(scored)} of {count} directions scored"
            print(f"{ended}; finished sentences are kept, the same command continues", flush=True)
            raise
    if odd := ", ".join(direction for direction, score in scored.items() if score.has_odd_length):
        warn(
            f"the translations of {odd} are much longer or shorter than the references (0.8 to 1.2 times as "
            "long is usual): look at them. Few updates are the usual cause; where experts have a limit, smoe "
            "analyze shows the dropped choices by position (docs/analysis.md)"
        )
    if evaluation.partial.exists():
        evaluation.finish(scored)
    elif not evaluation.has_saved(scored):
        evaluation.save(scored, evaluation.folder)


def _check_model(evaluation: Evaluation) -> None:
    """Raise UsageError if the checkpoint's model has other options than the run."""
    with quietly():
        from smoe_fairseq.analysis.cost import ARCHITECTURES, config_of, parse_model  # fairseq
        from smoe_fairseq.recipes.cost import saved_model
    flags = identity.record(evaluation.folder).get("flags", {})
    if flags.get("--arch") not in ARCHITECTURES:  # a run without an identity, or a model of fairseq
        return
    own = config_of(parse_model(words_of(flags)))
    saved = config_of(saved_model(evaluation.checkpoint)[0])
    for option in fields(own):
        value, other = getattr(own, option.name), getattr(saved, option.name, None)
        flag = flag_of(option.name)
        # --force-resume may have changed numbers such as --dropout.
        if value != other and not isinstance(value, float) and identity.fixed_flags({flag: ""}):
            trained = f"{evaluation.checkpoint} was trained with {flag} {other}"
            raise UsageError(f"{trained}, and the run in its folder with {flag} {value}")


def _score(evaluation: Evaluation, direction: str) -> scores.Score:
    """Write sacreBLEU's output for new translations, in place of that of an evaluation that was cut short."""
    for file in evaluation.partial.glob(f"{direction}.*json"):
        file.unlink()
    evaluation.add_scores(evaluation.partial, direction)
    return evaluation.score(evaluation.partial, direction)

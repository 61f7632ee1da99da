"""``python -m smoe_fairseq.recipes``: what ``scripts/`` and the commands they print call."""

import argparse
import os
import sys
from pathlib import Path

from smoe_fairseq.errors import ends_with_sentence, positive, writes_all
from smoe_fairseq.recipes import gpu_hours, processes, table
from smoe_fairseq.recipes.config import load_dataset
from smoe_fairseq.recipes.subwords import add_learning, learning_options

SCRIPTS = ("prepare", "train", "evaluate", "study", "report", "table")


@ends_with_sentence
@writes_all
def main() -> int:
    """Runs one recipe or one step of it."""
    if os.environ.get(processes.STARTED):  # a step, or a run of a study
        processes.end_with_parent()
    given = _parser().parse_args()
    try:
        given.run(given)
    except KeyboardInterrupt:
        return 130
    return 0


def _prepare(given) -> None:
    from smoe_fairseq.recipes.prepare import prepare

    prepare(load_dataset(given.dataset), given.flags)


def _train(given) -> None:
    from smoe_fairseq.recipes.train import train

    train(load_dataset(given.dataset), given.method, given.flags)


def _evaluate(given) -> None:
    from smoe_fairseq.recipes.evaluate import evaluate

    evaluate(load_dataset(given.dataset), given.method, given.flags)


def _translate(given) -> None:
    from smoe_fairseq.recipes.evaluate import plan, translate

    translate(plan(load_dataset(given.dataset), given.method, given.flags))


def _generator(_) -> None:
    from smoe_fairseq.recipes.generate import serve

    serve()


def _study(given) -> None:
    from smoe_fairseq.recipes.study import study
    from smoe_fairseq.recipes.study_report import write_report

    dataset = load_dataset(given.dataset)
    study(dataset, given.flags, lambda: write_report(dataset))


def _report(given) -> None:
    from smoe_fairseq.recipes.processes import dry_run
    from smoe_fairseq.recipes.study_report import write_report

    dataset = load_dataset(given.dataset)
    if not dry_run():
        write_report(dataset)


def _demo(given) -> None:
    from smoe_fairseq.recipes.demo import demo

    demo(load_dataset(given.dataset), given.method)


def _foretell(given) -> None:
    from smoe_fairseq.recipes.train import tell

    tell(load_dataset(given.dataset), given.processes, given.on_machine, given.flags)


def _fetch(given) -> None:
    from smoe_fairseq.recipes.download import fetch

    fetch(load_dataset(given.dataset), given.folder)


def _unpack(given) -> None:
    from smoe_fairseq.recipes.download import remote_files, unpack

    dataset = load_dataset(given.dataset)
    archives = [given.downloads / remote.name for remote in remote_files(dataset)]
    unpack(dataset, archives, given.target)


def _adopt(given) -> None:
    from smoe_fairseq.recipes.prepare import adopt

    adopt(load_dataset(given.dataset), given.source, given.raw, given.output, given.longest)


def _gather(given) -> None:
    from smoe_fairseq.recipes.messages import gather_messages
    from smoe_fairseq.recipes.raw import gather

    dataset = load_dataset(given.dataset)
    if dataset.raw.get("messages") and not any(given.source.glob("train.*")):
        gather_messages(dataset, given.source, given.target)
    else:
        gather(dataset, given.source, given.target, given.workers)


def _learn(given) -> None:
    from smoe_fairseq.recipes.binarise import learn

    learn(given.raw, given.output, learning_options(given))


def _encode(given) -> None:
    from smoe_fairseq.recipes.binarise import encode

    encode(given.model, given.raw, given.output, given.shards, given.longest, given.workers)


def _binarise(given) -> None:
    from smoe_fairseq.recipes.binarise import binarise

    dataset = load_dataset(given.dataset)
    binarise(dataset, given.text, given.dictionary, given.output, given.workers)


def _tokenizer(given) -> None:
    from smoe_fairseq.recipes.download import fetch_tokenizer

    fetch_tokenizer(given.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="smoe_fairseq.recipes", description=__doc__)
    recipes = parser.add_subparsers(required=True, metavar="RECIPE")

    def add(name: str, run, text: str, *names: str, paths: tuple[str, ...] = ()):
        prog = f"scripts/{name}.sh" if name in SCRIPTS else None
        recipe = recipes.add_parser(name, help=text, description=text, prog=prog)
        recipe.set_defaults(run=run)
        for operand in names:
            recipe.add_argument(operand, metavar=operand.upper())
        for operand in paths:
            recipe.add_argument(operand, metavar=operand.upper(), type=Path)
        return recipe

    def add_rest(recipe, metavar: str = "FLAGS") -> None:
        # Not required, which argparse says of it where another one is missing.
        recipe.add_argument("flags", metavar=metavar, nargs=argparse.REMAINDER).required = False

    add_rest(add("prepare", _prepare, "fetch, segment and binarise; FLAGS go to learn", "dataset"))
    for name, run, text in (
        ("train", _train, "train a method; FLAGS go to fairseq-train"),
        ("evaluate", _evaluate, "translate and score; FLAGS go to fairseq-generate"),
        (
            "translate",
            _translate,
            "step: the directions that are left; FLAGS go to fairseq-generate",
        ),
    ):
        add_rest(add(name, run, text, "dataset", "method"))
    text = "all methods and SEEDS; METHODS, then flags of fairseq-train"
    add_rest(add("study", _study, text, "dataset"), "METHODS")
    add("report", _report, "of the runs of a study that are kept, without the others", "dataset")
    table.add_table_arguments(add("table", table.run_table, "print the scores of all methods"))
    text = "estimate the hours of GPU that training a table takes"
    gpu_hours.add_arguments(add("gpu-hours", gpu_hours.run_gpu_hours, text, "dataset"))
    add("demo", _demo, "all of these, and what has been learnt", "dataset", "method")
    add("fetch", _fetch, "step: download the raw files", "dataset", paths=("folder",))
    foretell = add("foretell", _foretell, "step: what training takes of memory", "dataset")
    foretell.add_argument("processes", type=int)
    foretell.add_argument("on_machine", type=int)
    add_rest(foretell)
    paths = ("downloads", "target")
    add("unpack", _unpack, "step: the archives' files that are needed", "dataset", paths=paths)
    paths = ("source", "raw", "output")
    adopt = add("adopt", _adopt, "step: binarised text as it is", "dataset", paths=paths)
    adopt.add_argument("--longest", type=int, default=0)
    paths = ("source", "target")
    gather = add("gather", _gather, "step: one text layout", "dataset", paths=paths)
    learn = add("learn", _learn, "step: sentencepiece model", paths=("raw", "output"))
    add_learning(learn)
    encode = add("encode", _encode, "step: text to subwords", paths=("model", "raw", "output"))
    encode.add_argument("--shards", type=int, default=1)
    encode.add_argument("--longest", type=int, default=0)
    add("generator", _generator, "step: fairseq-generate for each line of standard input")
    paths = ("text", "dictionary", "output")
    binarise = add("binarise", _binarise, "step: subwords to numbers", "dataset", paths=paths)
    for step in (gather, encode, binarise):
        step.add_argument("--workers", type=positive, default=1, help="processes (1)")
    add("tokenizer", _tokenizer, "step: sacreBLEU's tokenizer model", "name")
    return parser


if __name__ == "__main__":
    sys.exit(main())

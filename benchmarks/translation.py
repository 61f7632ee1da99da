"""Times a trained model's translation: `smoe translate`'s core beside fairseq's generator, and the programs.

    python -m benchmarks.translation RUN --data data/multi30k/bin --text data/multi30k/raw --direction en-de

Both translate the test set's text to text in one process, with the model loaded before, in turns; before
that their translations are compared. Ours takes turns in float32, in int8 and with ``--shortlist``, and so
do ``model.translate`` in Python, CTranslate2, with a dense model that is exported to it, and
transformers' ``generate``, where it is installed. BLEU and chrF++ stand beside the speeds. With
``--programs`` also fairseq-generate and smoe translate, each as a process, by the speed that each reports
and by its time from start to end.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import timing
from smoe_fairseq.errors import quietly

BEAM = 5
MAX_TOKENS = 8192  # per batch of fairseq's, as in configs/datasets/multi30k.yaml
BATCH = 50  # sentences of a batch of transformers
SCRIPTS = Path(sysconfig.get_path("scripts"))


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    source, target = args.direction.split("-")
    pair = args.direction if (args.data / f"test.{args.direction}.{source}.idx").exists() else None
    args.pair = pair or f"{target}-{source}"
    file = args.text / f"test.{args.pair}.{source}"
    run = timing.describe(torch.device("cpu"))
    run |= {"run": str(args.run), "direction": args.direction}
    reference = args.text / f"test.{args.pair}.{target}"
    texts = [path.read_text().split("\n")[:-1] for path in (file, reference)]
    with quietly(), tempfile.TemporaryDirectory() as folder:
        run |= in_process(args, *texts, source, target, Path(folder))
    if args.programs:
        run["programs"] = programs(args, file, source, target)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def in_process(
    args: argparse.Namespace,
    text: list[str],
    reference: list[str],
    source: str,
    target: str,
    folder: Path,
) -> dict:
    """Speeds, BLEU and agreement with fairseq; ``folder`` is for exported models."""
    import sacrebleu

    from smoe_fairseq.models import SMoETransformerModel
    from smoe_fairseq.translate.translator import BatchTranslator, Options

    model = SMoETransformerModel.from_pretrained(args.run, data_name_or_path=args.data)
    model.cfg.dataset.max_tokens = MAX_TOKENS

    def loaded(**options) -> BatchTranslator:
        # A model of its own each: a `BatchTranslator` changes the layout of its weights.
        again = SMoETransformerModel.from_pretrained(args.run, data_name_or_path=args.data)
        return BatchTranslator(again, **options)

    ours = loaded()
    languages = {"source_lang": source, "target_lang": target}
    limits = {} if args.length is None else {"min_len": args.length, "max_len_b": args.length}
    options = Options(beam=BEAM, **limits)

    def best(translator: BatchTranslator) -> list[str]:
        found = translator.translate_batch(text, source, target, options)
        return [translation.hypotheses[0].text for translation in found]

    contenders = {
        "fairseq": lambda: model.sample(text, BEAM, **languages, **limits),
        "smoe": lambda: best(ours),
        "python": lambda: model.translate(text, BEAM, **languages, **limits),
    }
    others = {"smoe int8": {"int8": True}}
    if args.shortlist is not None:
        others["smoe shortlist"] = {"shortlist": args.shortlist}
    contenders |= {name: partial(best, loaded(**options_of)) for name, options_of in others.items()}
    if not any(layer.is_moe for side in _sides(model) for layer in side.layers):
        # What the encoder is given before the subwords: a token of a language, or nothing.
        first = ours.translate_batch(text[:1], source, target)[0].tokens
        prefix = first[: len(first) - 1 - len(model.apply_bpe(text[0]).split())]
        contenders |= of_ctranslate2(args, model, text, prefix, options, folder / "ctranslate2")
    if importlib.util.find_spec("transformers") is not None:
        generate = of_transformers(args, text, source, target, limits, folder / "transformers")
        contenders["transformers"] = generate
    found = {name: contender() for name, contender in contenders.items()}
    same = {
        name: sum(a == b for a, b in zip(found["fairseq"], found[name], strict=True))
        for name in found
        if name != "fairseq"
    }
    times = timing.in_turns(contenders, torch.device("cpu"), args.seconds)
    return {
        "sentences": len(text),
        "same": same,
        "bleu": {n: sacrebleu.corpus_bleu(found[n], [reference]).score for n in found},
        "chrf++": {
            n: sacrebleu.corpus_chrf(found[n], [reference], word_order=2).score for n in found
        },
        "rounds": len(times["smoe"]),
        "speed": {n: timing.summary([len(text) / t for t in times[n]]) for n in times},
        "faster": timing.ratio(times, "fairseq", "smoe"),
        "over_smoe": {n: timing.ratio(times, "smoe", n) for n in times if n != "smoe"},
    }


def _sides(model) -> tuple:
    return model.models[0].encoder, model.models[0].decoder


def of_ctranslate2(
    args: argparse.Namespace, model, text: list[str], prefix: list[str], options, folder: Path
) -> dict[str, Callable[[], list[str]]]:
    """CTranslate2 in float32 and int8 on the same dense model, from text to text."""
    import ctranslate2

    from smoe_fairseq.checkpoints.export import write_ctranslate2

    write_ctranslate2(checkpoint(args.run), folder, force=False)

    def contender(compute_type: str) -> Callable[[], list[str]]:
        translator = ctranslate2.Translator(
            str(folder), compute_type=compute_type, intra_threads=torch.get_num_threads()
        )

        def translate() -> list[str]:
            found = translator.translate_batch(
                [[*prefix, *model.apply_bpe(line).split()] for line in text],
                beam_size=BEAM,
                max_batch_size=MAX_TOKENS,
                batch_type="tokens",
                min_decoding_length=options.min_len,
                max_decoding_length=options.max_len_b,
            )
            return [model.remove_bpe(" ".join(each.hypotheses[0])) for each in found]

        return translate

    return {f"ctranslate2 {name}": contender(name) for name in ("float32", "int8")}


def of_transformers(
    args: argparse.Namespace,
    text: list[str],
    source: str,
    target: str,
    limits: dict,
    folder: Path,
) -> Callable[[], list[str]]:
    """Its ``generate`` on the exported model, from text to text, in batches of about equal lengths."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import smoe_fairseq.huggingface  # noqa: F401
    from smoe_fairseq.checkpoints.huggingface import write_huggingface

    write_huggingface(checkpoint(args.run), folder, force=False)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    options = {}
    if limits:
        options = {
            "min_new_tokens": limits["min_len"],
            "max_new_tokens": limits["max_len_b"] + 1,
        }
    order = sorted(range(len(text)), key=lambda i: len(text[i]))

    def translate() -> list[str]:
        found = {}
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            batch = tokenizer([text[i] for i in some], return_tensors="pt", padding=True)
            ids = model.generate(**batch, **options)
            found |= zip(some, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True)
        return [found[i] for i in range(len(text))]

    return translate


def programs(args: argparse.Namespace, file: Path, source: str, target: str) -> dict:
    """Sentences per second by each program's own account, and seconds from start to end."""
    from fairseq import checkpoint_utils

    task = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint(args.run)))["cfg"].task
    generate = [
        *(SCRIPTS / "fairseq-generate", args.data, "--user-dir", "smoe_fairseq"),
        *("--path", checkpoint(args.run), "--task", "translation_multi_simple_epoch"),
        *("--langs", ",".join(task.langs), "--lang-pairs", args.direction),
        *("--source-lang", source, "--target-lang", target, "--beam", BEAM),
        *("--encoder-langtok", task.encoder_langtok, "--max-tokens", MAX_TOKENS),
        *("--remove-bpe", "sentencepiece", "--cpu"),
    ]
    translate = [
        *(sys.executable, "-m", "smoe_fairseq.cli", "translate", args.run, "--data", args.data),
        *("--from", source, "--to", target, "--beam", BEAM),
    ]
    found: dict[str, list] = {"fairseq": [], "smoe": []}
    for _ in range(args.rounds):
        for name, command in (("fairseq", generate), ("smoe", translate)):
            begun = time.perf_counter()
            with open(file) as text:
                result = subprocess.run(
                    list(map(str, command)),
                    stdin=text,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=True,
                )
            seconds = time.perf_counter() - begun
            said = re.findall(r"\(([\d.]+) (?:sentences/s|per second)", result.stdout)
            found[name].append((1 / float(said[-1]), seconds))
    own, whole = ({n: [x[i] for x in found[n]] for n in found} for i in range(2))
    return {
        "rounds": args.rounds,
        "speed": {n: timing.summary([1 / t for t in own[n]]) for n in own},
        "faster": timing.ratio(own, "fairseq", "smoe"),
        "seconds": {n: timing.summary(whole[n]) for n in whole},
        "sooner": timing.ratio(whole, "fairseq", "smoe"),
    }


def checkpoint(run: Path) -> Path:
    return run / "checkpoint_best.pt" if run.is_dir() else run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binarised text, with spm.model")
    parser.add_argument("--text", type=Path, required=True, help="folder of test.SRC-TGT.LANG")
    parser.add_argument("--direction", default="en-de")
    parser.add_argument(
        "--shortlist", type=Path, help="file of smoe shortlist, for one more in turns"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--length", type=int, metavar="N", help="force all translations to N tokens"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of turns, at least five")
    parser.add_argument("--programs", action="store_true", help="time the programs, too")
    parser.add_argument("--rounds", type=int, default=3, help="of the programs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/translation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

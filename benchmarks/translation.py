"""Times a trained model's translation of a test set, from text to text.

    python -m benchmarks.translation RUN --data data/multi30k/bin --text data/multi30k/raw --direction en-de

Interleaved runs in one process: fairseq's generator, `smoe translate` (float32, int8),
``model.translate``, CTranslate2 (for a dense model) and transformers' ``generate`` (both if installed), with
BLEU, chrF++ and the number of translations equal to fairseq's.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec as is_installed
from pathlib import Path

import torch

from benchmarks import timing
from smoe_fairseq.errors import quietly
from smoe_fairseq.translate.load import checkpoint_of

BEAM = 5
MAX_TOKENS = 8192  # per batch of fairseq's, as in configs/datasets/multi30k.yaml
BATCH = 50  # sentences of a batch of transformers


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    source, target = args.direction.split("-")
    prefix = args.data / f"test.{args.direction}.{source}.idx"
    pair = args.direction if prefix.exists() else f"{target}-{source}"
    files = [args.text / f"test.{pair}.{language}" for language in (source, target)]
    run = timing.describe(torch.device("cpu"))
    run |= {"run": str(args.run), "direction": args.direction}
    texts = [path.read_text().split("\n")[:-1] for path in files]
    with quietly(), tempfile.TemporaryDirectory() as folder:
        run |= in_process(args, *texts, source, target, Path(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def in_process(args, text: list[str], reference: list[str], source, target, folder: Path) -> dict:
    """Speeds, scores and agreement with fairseq; ``folder`` is for exported models."""
    from sacrebleu import corpus_bleu, corpus_chrf

    from smoe_fairseq.models import SMoETransformerModel
    from smoe_fairseq.translate.text import BatchTranslator, Options

    model = SMoETransformerModel.from_pretrained(args.run, data_name_or_path=args.data)
    model.cfg.dataset.max_tokens = MAX_TOKENS

    def loaded(**options) -> BatchTranslator:
        # Each has its own model, since a `BatchTranslator` changes the layout of its weights.
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
    contenders["smoe int8"] = partial(best, loaded(int8=True))
    layers = [*model.models[0].encoder.layers, *model.models[0].decoder.layers]
    if is_installed("ctranslate2") and not any(layer.is_moe for layer in layers):
        # The encoder's tokens before the subwords: a language's or none.
        first = ours.translate_batch(text[:1], source, target)[0].tokens
        prefix = first[: len(first) - 1 - len(model.apply_bpe(text[0]).split())]
        contenders |= of_ctranslate2(args, model, text, prefix, options, folder / "ctranslate2")
    if is_installed("transformers"):
        generate = of_transformers(args, text, source, target, limits, folder / "transformers")
        contenders["transformers"] = generate
    found = {name: contender() for name, contender in contenders.items()}
    fairseqs = found["fairseq"]
    same = {n: sum(a == b for a, b in zip(fairseqs, found[n], strict=True)) for n in contenders}
    del same["fairseq"]
    times = timing.in_turns(contenders, torch.device("cpu"), args.seconds)
    return {
        "sentences": len(text),
        "same": same,
        "bleu": {n: corpus_bleu(found[n], [reference]).score for n in found},
        "chrf++": {n: corpus_chrf(found[n], [reference], word_order=2).score for n in found},
        "rounds": len(times["smoe"]),
        "speed": {n: timing.summary([len(text) / t for t in times[n]]) for n in times},
        "faster": timing.ratio(times, "fairseq", "smoe"),
        "over_smoe": {n: timing.ratio(times, "smoe", n) for n in times if n != "smoe"},
    }


def of_ctranslate2(args, model, text, prefix, options, folder: Path) -> dict[str, Callable]:
    """CTranslate2 in float32 and int8 on the same dense model."""
    from smoe_fairseq.checkpoints.export import write_ctranslate2

    write_ctranslate2(checkpoint_of(args.run), folder, force=False, data=args.data)

    def translate(translator) -> list[str]:
        found = translator.translate_batch(
            [[*prefix, *model.apply_bpe(line).split()] for line in text],
            beam_size=BEAM,
            max_batch_size=MAX_TOKENS,
            batch_type="tokens",
            min_decoding_length=options.min_len,
            max_decoding_length=options.max_len_b + 1,  # steps
        )
        return [model.remove_bpe(" ".join(each.hypotheses[0])) for each in found]

    translators = ctranslate2_translators(folder, torch.get_num_threads())
    return {name: partial(translate, translator) for name, translator in translators.items()}


def ctranslate2_translators(folder: Path, threads: int) -> dict[str, object]:
    """CTranslate2 with an exported model, in float32 and int8."""
    import ctranslate2

    return {
        f"ctranslate2 {kind}": ctranslate2.Translator(
            str(folder), compute_type=kind, intra_threads=threads
        )
        for kind in ("float32", "int8")
    }


def of_transformers(args, text, source, target, limits, folder: Path) -> Callable[[], list[str]]:
    """Its ``generate`` on the exported model, in batches of similar lengths."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import smoe_fairseq.huggingface  # noqa: F401
    from smoe_fairseq.checkpoints.huggingface import write_huggingface

    write_huggingface(checkpoint_of(args.run), folder, force=False, half=False, data=args.data)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    options = {}
    if limits:
        options = {"min_new_tokens": args.length, "max_new_tokens": args.length + 1}
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binarised text, with spm.model")
    parser.add_argument("--text", type=Path, required=True, help="folder of test.SRC-TGT.LANG")
    parser.add_argument("--direction", default="en-de")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--length", type=int, metavar="N", help="tokens of every translation")
    parser.add_argument("--seconds", type=float, default=60, help="five rounds at least")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/translation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

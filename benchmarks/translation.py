"""Times a trained model's translation: `smoe translate`'s core beside fairseq's generator, and the programs.

    python -m benchmarks.translation RUN --data data/multi30k/bin --text data/multi30k/raw --direction en-de

Both translate the test set's text to text in one process, with the model loaded once, in turns; before that
their translations are compared. With ``--programs`` also fairseq-generate and smoe translate, each as a
process, by the speed that each reports and by its time from start to end.
"""

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks import machine, timing
from smoe_fairseq.system.quiet import quietly

BEAM = 5
MAX_TOKENS = 8192  # per batch of fairseq's, as in configs/datasets/multi30k.yaml
SCRIPTS = Path(sysconfig.get_path("scripts"))


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    source, target = args.direction.split("-")
    pair = args.direction if (args.data / f"test.{args.direction}.{source}.idx").exists() else None
    args.pair = pair or f"{target}-{source}"
    file = args.text / f"test.{args.pair}.{source}"
    run = machine.describe(torch.device("cpu"))
    run |= {"run": str(args.run), "direction": args.direction}
    with quietly():
        run |= in_process(args, file.read_text().split("\n")[:-1], source, target)
    if args.programs:
        run["programs"] = programs(args, file, source, target)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(json.dumps(run, indent=1))


def in_process(args: argparse.Namespace, text: list[str], source: str, target: str) -> dict:
    from smoe_fairseq.models import SMoETransformerModel
    from smoe_fairseq.translation.batch_translator import BatchTranslator, Options

    model = SMoETransformerModel.from_pretrained(args.run, data_name_or_path=args.data)
    model.cfg.dataset.max_tokens = MAX_TOKENS
    ours = BatchTranslator(model)
    languages = {"source_lang": source, "target_lang": target}
    contenders = {
        "fairseq": lambda: model.translate(text, BEAM, **languages),
        "smoe": lambda: ours.translate_batch(text, source, target, Options(beam=BEAM)),
    }
    expected = contenders["fairseq"]()
    found = [translation.hypotheses[0].text for translation in contenders["smoe"]()]
    same = sum(a == b for a, b in zip(expected, found, strict=True))
    times = timing.in_turns(contenders, torch.device("cpu"), args.seconds)
    return {
        "sentences": len(text),
        "same": same,
        "rounds": len(times["smoe"]),
        "speed": {n: timing.summary([len(text) / t for t in times[n]]) for n in times},
        "faster": timing.ratio(times, "fairseq", "smoe"),
    }


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
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=60, help="of turns, at least five")
    parser.add_argument("--programs", action="store_true", help="time the programs, too")
    parser.add_argument("--rounds", type=int, default=3, help="of the programs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/translation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

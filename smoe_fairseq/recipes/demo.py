"""``scripts/demo.sh``: prepare, train, evaluate, and show what the model does."""

import os
import sysconfig
from pathlib import Path

from smoe_fairseq.errors import quietly
from smoe_fairseq.files import read_text
from smoe_fairseq.recipes.compare.table import print_table
from smoe_fairseq.recipes.data.prepare import prepare
from smoe_fairseq.recipes.datasets import Dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.evaluate import evaluate
from smoe_fairseq.recipes.folders import Folders, run_name, test_file, whole_checkpoint
from smoe_fairseq.recipes.pretrained import with_pretrained
from smoe_fairseq.recipes.processes import command, run
from smoe_fairseq.recipes.training.train import train


def demo(dataset: Dataset, method: str) -> None:
    """Run all recipes in this process, so that it passes a signal on to the running command."""
    prepare(dataset)
    dataset = with_pretrained(dataset)
    train(dataset, method, [])
    os.environ["LOGLEVEL"] = "WARNING"  # of fairseq, which `_show` imports
    evaluate(dataset, method, [])
    if not dataset.settings.dry_run:
        _show(dataset, method)


def _show(dataset: Dataset, method: str) -> None:
    """Print sample translations, requested capacity and scores."""
    # Imported here because fairseq and torch would take memory during training.
    with quietly():
        from smoe_fairseq.analysis.inputs import load
        from smoe_fairseq.analysis.record import requested_capacity
        from smoe_fairseq.models.transformer import moe_blocks

    folders = Folders(dataset)
    folder = folders.runs / run_name(dataset, method)
    print("\nSample translations of the test set:")
    for i, direction in enumerate(scores.read(folder)):
        print(f"\n  {direction}")
        for name, sentence in _sample(dataset, folder, direction, 7 * i).items():
            print(f"    {name:12}{sentence}")
    print("\nRequested capacity, mean over the validation set's tokens:")
    checkpoint, _ = whole_checkpoint(folder, dataset.checkpoint)
    with quietly():
        model, task = load(checkpoint, folders.binary)
        requested = requested_capacity(model, task)
    blocks = moe_blocks(model)
    for layer, capacity in requested.items():
        print(f"  {layer:20}{capacity:.2f} of {len(blocks[layer].strata)} strata")
    print()
    print_table(dataset, "markdown", scores.BLEU, None)
    if blocks:
        print("\nWhere the capacity goes, by language, token and depth:", flush=True)
        report = folder / "report"
        analyze = ("smoe", "analyze", folders.binary, "--path", checkpoint, "--output", report)
        run([command("rm", "-rf", report), command(*analyze)], dataset.settings)
    print(f"\nIn the browser, with the path of each token through the strata:\n  {_serve(folder)}")


def _serve(folder: Path) -> str:
    """The command that serves the page, with the path of this environment's ``smoe``."""
    from smoe_fairseq.serve.server import PORT  # imports starlette and fairseq

    smoe = Path(sysconfig.get_path("scripts")) / "smoe"
    if smoe.is_relative_to(Path.cwd()):
        smoe = smoe.relative_to(Path.cwd())
    return f"{command(smoe, 'serve', folder)}    # then open http://127.0.0.1:{PORT}/"


def _sample(dataset: Dataset, folder: Path, direction: str, number: int) -> dict[str, str]:
    source, target = (test_file(dataset, direction, each) for each in direction.split("-"))
    files = {"source": source, "reference": target}
    files["translation"] = folder / "test" / f"{direction}.txt"
    texts = {name: read_text(file).splitlines() for name, file in files.items()}
    return {name: lines[number % len(lines)] for name, lines in texts.items()}

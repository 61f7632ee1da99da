"""What ``scripts/demo.sh`` shows at the end: scores, sample translations, requested capacity."""

from collections.abc import Iterator

import fairseq  # noqa: F401  (the plugin's model registers itself as soon as fairseq is there)
import torch
from fairseq import checkpoint_utils

from smoe_fairseq.modules import StratifiedMoE
from smoe_fairseq.recipes import scores, table
from smoe_fairseq.recipes.config import Dataset
from smoe_fairseq.recipes.folders import Folders

_VALIDATION_TOKENS = 4096


def show(dataset: Dataset, method: str) -> None:
    """Prints what a method that was trained and evaluated has learnt."""
    folder = Folders(dataset.name).run(method)
    print("\nSample translations of the test set:")
    for i, direction in enumerate(scores.read(folder)):
        print(f"\n  {direction}")
        for name, sentence in _sample(dataset, method, direction, 7 * i).items():
            print(f"    {name:12}{sentence}")
    print("\nRequested capacity, mean over the validation set's tokens:")
    for layer, (capacity, strata) in requested_capacity(dataset, method).items():
        print(f"  {layer:20}{capacity:.2f} of {strata} strata")
    print(f"\nsacreBLEU of the test set:\n\n{table.markdown(table.collect(dataset))}")


def requested_capacity(dataset: Dataset, method: str) -> dict[str, tuple[float, int]]:
    """Strata that a token stops at on average, and strata there are, of each MoE layer.

    Measured on the validation set of all directions, with the references as decoder input.
    """
    folders = Folders(dataset.name)
    checkpoint = folders.run(method) / f"checkpoint_{dataset.checkpoint}.pt"
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(folders.binary)}
    )
    model = models[0].eval()
    blocks = [(n, m) for n, m in model.named_modules() if isinstance(m, StratifiedMoE)]
    names = [name.removesuffix(".moe").replace("layers", "layer") for name, _ in blocks]
    strata = [len(block.strata) for _, block in blocks]
    requested = torch.zeros(len(blocks))
    tokens = torch.zeros(len(blocks))
    for batch in _validation_batches(task):
        with torch.no_grad():
            _, extra = model(**batch["net_input"])
        for i, stats in enumerate(extra["moe_stats"]):
            requested[i] += stats.requested_capacity.sum()
            tokens[i] += (stats.requested_capacity > 0).sum()
    means = (requested / tokens).tolist()
    return dict(zip(names, zip(means, strata, strict=True), strict=True))


def _validation_batches(task) -> Iterator[dict]:
    task.load_dataset("valid")
    batches = task.get_batch_iterator(
        dataset=task.dataset("valid"),
        max_tokens=_VALIDATION_TOKENS,
        max_positions=task.max_positions(),
        ignore_invalid_inputs=True,
    )
    return batches.next_epoch_itr(shuffle=False)


def _sample(dataset: Dataset, method: str, direction: str, line: int) -> dict[str, str]:
    source, target = direction.split("-")
    folders = Folders(dataset.name)
    test = folders.raw / f"test.{dataset.pair_of(direction)}"
    files = {
        "source": f"{test}.{source}",
        "reference": f"{test}.{target}",
        "translation": folders.run(method) / "test" / f"{direction}.txt",
    }
    sentences = {}
    for name, file in files.items():
        with open(file, encoding="utf-8") as lines:
            lines = lines.read().splitlines()
        sentences[name] = lines[line % len(lines)]
    return sentences

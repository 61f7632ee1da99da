"""``--subword-sampling``: training text is divided anew, stays the same text, and a run resumes exactly."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from commands import PLUGIN, load, refused, run, smoe, step_here
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from test_recipes import write_dataset

from smoe_fairseq.recipes.data import readers
from smoe_fairseq.recipes.folders import package_folder
from smoe_fairseq.training import subword_sampling
from smoe_fairseq.training.subword_sampling import Sampler, sample_subwords

SENTENCES = {"eng-nso": 100, "eng-cat": 300}
MANY = """--task translation_multi_simple_epoch --encoder-langtok tgt --decoder-langtok
    --langs eng,nso,cat --lang-pairs nso-eng,eng-nso,eng-cat""".split()
TASKS = {
    "bilingual": ["--task", "translation", "-s", "eng", "-t", "cat"],
    "multilingual": [*MANY, "--sampling-method", "temperature", "--sampling-temperature", "2"],
    "tokens-for-ends": [*MANY, "--lang-tok-replacing-bos-eos"],
    "virtual-epochs": [*MANY, "--virtual-epoch-size", "400"],
}
LIMIT = 500  # tokens of a batch
MOST = (60, 60)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Some of the built-in corpus, as the recipe prepares it."""
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "text").mkdir()
    file = Path(package_folder("recipes", "phrasebook")).absolute() / "train.tsv.xz"
    for pair, count in SENTENCES.items():
        languages = pair.split("-")
        rows = ["\t".join(row) for row in readers.pairs(dict.fromkeys(languages, file))]
        (folder / f"text/train.{pair}.tsv").write_text("\n".join(rows[:count]))
        (folder / f"text/valid.{pair}.tsv").write_text("\n".join(rows[-20:]))
    given = write_dataset(
        folder / "configs", "tiny", pairs=[*SENTENCES], subwords={"vocab-size": 400}
    )
    done = step_here("prepare", "tiny", cwd=folder, RAW=str(folder / "text"), WORKERS="1", **given)
    assert done.returncode == 0, done.stderr
    return folder / "data/tiny/bin"


@pytest.fixture(scope="module")
def model(data):
    return sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))


def task_of(data, name, alpha=0.2, seed=3):
    """A task that has loaded its data; not sampled with alpha 0."""
    parser = options.get_training_parser()
    words = [str(data), "--arch", "smoe_transformer", *TASKS[name]]
    given = options.parse_args_and_arch(parser, words)
    given.max_source_positions = given.max_target_positions = 1024  # of the model
    task = tasks.setup_task(given)
    if alpha:
        sample_subwords(task, "train", alpha, seed, MOST)
    for split in ("train", "valid"):
        task.load_dataset(split, epoch=1)
    return task


def batches(task, epoch=1, workers=0):
    """Those of an epoch, in order."""
    iterator = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=LIMIT,
        max_positions=MOST,
        num_workers=workers,
        epoch=epoch,
    )
    return list(iterator.next_epoch_itr(shuffle=False))


def texts(task, model, batch, side="target"):
    """Of each sentence its text and its pieces, which may begin with the token of a language."""
    ids = batch["target"] if side == "target" else batch["net_input"]["src_tokens"]
    dictionary = task.target_dictionary
    for row in ids:
        words = [dictionary[i] for i in row if i not in (dictionary.pad(), dictionary.eos())]
        pieces = [word for word in words if not word.startswith("__")]
        yield model.decode(pieces), tuple(pieces)


def by_pair(task, model, all_batches):
    found = {}
    for batch in all_batches:
        sides = zip(texts(task, model, batch, "source"), texts(task, model, batch), strict=True)
        for (source, pieces), (target, others) in sides:
            found.setdefault((source, target), set()).add((pieces, others))
    return found


@pytest.mark.parametrize("name", TASKS)
def test_segmentations_change_and_texts_and_limits_do_not(data, model, name):
    task, plain = task_of(data, name), task_of(data, name, alpha=0)
    drawn = batches(task)
    for batch in drawn:
        for ids in (batch["target"], batch["net_input"]["src_tokens"]):
            assert ids.numel() <= LIMIT and ids.shape[1] <= MOST[0]
    assert max(batch["target"].numel() for batch in drawn) > 0.7 * LIMIT
    sampled, usual = (by_pair(task, model, each) for each in (drawn, batches(plain)))
    assert len(sampled) > 250
    if name == "bilingual":  # in each epoch all pairs
        assert sampled.keys() == usual.keys()
    both = sampled.keys() & usual.keys()
    assert sum(sampled[pair] != usual[pair] for pair in both) > 0.8 * len(both) > 150
    valid = (each.dataset("valid") for each in (task, plain))
    one, other = (each.collater([each[i] for i in range(20)])["target"] for each in valid)
    assert torch.equal(one, other)


@pytest.mark.soak
def test_workers_epochs_and_seeds(data, model):
    task, same, other = (task_of(data, "multilingual", seed=seed) for seed in (3, 3, 4))
    first, again = batches(task), batches(same, workers=2)
    for one, twin in zip(first, again, strict=True):
        assert torch.equal(one["target"], twin["target"]) and torch.equal(one["id"], twin["id"])
        assert torch.equal(one["net_input"]["src_tokens"], twin["net_input"]["src_tokens"])
    first, seed = (by_pair(t, model, batches(t)) for t in (task, other))
    task.dataset("train").set_epoch(2)
    second = by_pair(task, model, batches(task, epoch=2))
    for other in (second, seed):
        both = first.keys() & other.keys()
        assert np.mean([first[pair] != other[pair] for pair in both]) > 0.7


def test_unknown_words_and_other_segmentations_stay(data, model, tmp_path):
    """A text that was divided by another model, or has a word that no piece has."""
    known = (data / "dict.txt").read_text().splitlines()
    unknown = f"{known[5].split()[0]} unheard {known[6].split()[0]}\n"
    for language, text in (("eng", "\u2581 h o u s e\n"), ("cat", "h o u s e\n")):
        for split in ("train", "valid"):
            (tmp_path / f"{split}.{language}").write_text(text + unknown)
    words = ("fairseq-preprocess", "-s", "eng", "-t", "cat", "--destdir", tmp_path / "bin")
    words += ("--srcdict", data / "dict.txt", "--tgtdict", data / "dict.txt")
    run(*words, "--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid")
    (tmp_path / "bin/spm.model").write_bytes((data / "spm.model").read_bytes())
    task, plain = (task_of(tmp_path / "bin", "bilingual", alpha) for alpha in (0.1, 0))
    sampled, usual = (each.dataset("train") for each in (task, plain))
    for side in ("source", "target"):
        assert torch.equal(sampled[0][side], usual[0][side])
        one, other = (
            [task.target_dictionary[i] for i in each[1][side]] for each in (sampled, usual)
        )
        assert "<unk>" in one and "".join(one) == "".join(other)


def test_byte_pairs(data, tmp_path):
    """Without dropout our merges are sentencepiece's; with a probability of 1 none is left."""
    text = (data.parent / "raw/train.eng-cat.cat").read_text()
    (tmp_path / "text").write_text(text)
    words = ["learn", tmp_path / "text", "--model-type", "bpe", "--vocab-size", 300]
    smoe("subwords", *words, "--output", tmp_path / "bpe")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe/spm.model"))
    dictionary = Dictionary.load(str(tmp_path / "bpe/dict.txt"))
    some = Counter()
    for line in text.splitlines()[:100]:
        tokens = " ".join(model.encode(line, out_type=str))
        tokens = dictionary.encode_line(tokens, add_if_not_exist=False).long()
        pieces = [dictionary[i] for i in tokens[:-1]]
        for alpha in (1e-12, 0.3, 1):
            drawn = Sampler(tmp_path / "bpe/spm.model", dictionary, alpha)(tokens, "1", 1000)
            found = [dictionary[i] for i in drawn[:-1]]
            assert drawn[-1] == dictionary.eos() and model.decode(found) == model.decode(pieces)
            some[alpha, found == pieces] += 1
            if alpha == 1 and "<unk>" not in pieces:
                assert found == [*"".join(pieces)]
    assert some[1e-12, True] == 100 and some[0.3, False] > 95


def learned(folder, lines, kind, **options):
    """A sampler by a model of some lines, whose dictionary is of some texts, and the ids of these."""
    texts = options.pop("texts", lines)
    prefix = str(folder / "spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_prefix=prefix,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    dictionary = Dictionary()
    rows = [
        dictionary.encode_line(" ".join(model.encode(text, out_type=str)), append_eos=False).long()
        for text in texts
    ]
    return Sampler(folder / "spm.model", dictionary, 0.5), rows


def drawn_texts(sampler, row):
    """Those of 200 draws, joined, and the number of different draws."""
    draws = [tuple(sampler(row, str(seed), 1000).tolist()) for seed in range(200)]
    return {"".join(sampler.symbols[i] for i in draw) for draw in draws}, len(set(draws))


def test_pieces_that_the_dictionary_lacks_are_not_drawn(tmp_path):
    """A dictionary of divided text lacks letters that are always merged, and pieces on the way to others."""
    lines = ["葡萄 好", "好 葡萄 abab", "abab aba ab a b 好"]
    texts = ["a葡萄", "abab", "a b 萄 bb aa"]
    sampler, rows = learned(tmp_path, lines, "bpe", vocab_size=40, texts=texts)
    assert not {"葡", "ab", "▁ab"} & sampler.ids.keys()
    for row, text in zip(rows, ("▁a葡萄", "▁abab", "▁a▁b▁萄▁bb▁aa"), strict=True):
        found, different = drawn_texts(sampler, row)
        assert found == {text} and different > 1


def test_letters_that_a_unigram_model_does_not_cover(tmp_path):
    """Divided text has such a letter itself, which is no piece of the model: the word stays."""
    lines = ["abab aba ab a b", "house mouse houses", "mouses abba 5 a"]
    texts = ["5€", "houses"]
    sampler, (first, second) = learned(tmp_path, lines, "unigram", vocab_size=24, texts=texts)
    assert "€" in sampler.ids and sampler.is_unigram
    assert drawn_texts(sampler, first) == ({"▁5€"}, 1)
    assert drawn_texts(sampler, second)[0] == {"▁houses"}


def test_whole_sentences_are_not_kept(tmp_path, monkeypatch):
    """A text without blanks is one long word; draws are those with a cache of all."""
    lines, texts = ["ab abab ba a b"], ["ab", "ab" * 15, "aa bb"]
    sampler, (*rows, _) = learned(tmp_path, lines, "bpe", vocab_size=8, texts=texts)
    draws = [sampler(row, str(seed), 1000).tolist() for row in rows for seed in range(99)]
    assert len(rows[1]) > subword_sampling.MAX_PIECES
    assert [*sampler.cache] == [tuple(sampler.symbols[i] for i in rows[0])]
    monkeypatch.setattr(subword_sampling, "MAX_PIECES", 1000)
    again = [sampler(row, str(seed), 1000).tolist() for row in rows for seed in range(99)]
    assert draws == again and len(set(map(tuple, draws))) > 2 and len(sampler.cache) == 2


SIZES = """--arch smoe_transformer_tiny --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 16 --smoe-strata 2-2 --criterion smoe_label_smoothed_cross_entropy
    --optimizer adam --lr 0.01 --max-tokens 2000 --no-epoch-checkpoints --num-workers 0 --cpu
    --disable-validation""".split()


def parameters(data, folder, *flags) -> dict:
    """What a training makes of the model."""
    words = ["--user-dir", PLUGIN, *TASKS["bilingual"], *SIZES, "--save-dir", folder, *flags]
    run("fairseq-train", data, *words)
    return load(folder / "checkpoint_last.pt")["model"]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one | other)


def test_workers_draw_anew_in_each_epoch(data, tmp_path):
    """Also those of a run that is resumed within an epoch, without a buffer."""
    flags, updates = ["--subword-sampling", 0.2, "--max-update"], 14  # more than an epoch
    workers = ["--num-workers", 1, "--data-buffer-size", 0]
    alone = parameters(data, tmp_path / "alone", *flags, updates)
    assert equal(alone, parameters(data, tmp_path / "whole", *flags, updates, *workers))
    parameters(data, tmp_path / "parts", *flags, updates - 1, *workers)
    assert equal(alone, parameters(data, tmp_path / "parts", *flags, updates, *workers))


@pytest.mark.soak
def test_zero_is_none_and_a_run_resumes_exactly(data, tmp_path):
    short, long = ["--max-update", 8], ["--max-update", 14]  # more than an epoch
    flags = ["--subword-sampling", 0.2]
    none = parameters(data, tmp_path / "none", *short)
    assert equal(none, parameters(data, tmp_path / "zero", *short, "--subword-sampling", 0))
    assert not equal(none, parameters(data, tmp_path / "parts", *short, *flags))
    whole = parameters(data, tmp_path / "whole", *flags, *long)
    assert equal(whole, parameters(data, tmp_path / "parts", *flags, *long))


@pytest.fixture(scope="module")
def shards(data, tmp_path_factory):
    """The data in two folders, which have different parts of the two pairs' sentences."""
    folder = tmp_path_factory.mktemp("shards")
    for number in (0, 1):
        shard = shutil.copytree(data, folder / str(number))
        for file in shard.glob("train.*.bin"):
            whole, part = str(data / file.stem), str(file.with_suffix(""))
            text, builder = MMapIndexedDataset(whole), MMapIndexedDatasetBuilder(f"{part}.bin")
            first = 2 * len(text) // (3 if "nso" in part else 5)
            for i in range(len(text))[first:] if number else range(first):
                builder.add_item(text[i])
            builder.finalize(f"{part}.idx")
    return f"{folder / '0'}:{folder / '1'}"


EPOCHS = "--virtual-epoch-size", 150
PARTS = {
    "sampled": [*EPOCHS, "--subword-sampling", 0.2],
    "shards-in-parts": EPOCHS,
    "shards-in-parts-of-a-known-size": [*EPOCHS, "--virtual-data-size", 450],
}


@pytest.mark.soak
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_data_continue(data, shards, tmp_path, name):
    """Within and after epochs that read parts of the data."""
    words = [*TASKS["multilingual"], *SIZES, "--batch-size", 40, *PARTS[name], "--save-dir"]
    text = shards if name.startswith("shards") else data

    def trained(folder, *limit):
        folder = tmp_path / folder
        run("fairseq-train", text, "--user-dir", PLUGIN, *words, folder, *limit)
        return load(folder / "checkpoint_last.pt")

    whole = trained("whole", "--max-epoch", 7)
    updates = whole["optimizer_history"][-1]["num_updates"]
    stops = [("--max-epoch", epoch) for epoch in (3, 6)]
    stops += [("--max-update", updates * part // 16) for part in (7, 11)]
    others = []
    for stop in stops:
        folder = "-".join(map(str, stop))
        trained(folder, *stop)
        if not equal(whole["model"], trained(folder, "--max-epoch", 7)["model"]):
            others.append(stop)
    assert not others


def test_a_model_that_is_none_is_named(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "data")
    (folder / "spm.model").write_bytes(b"no model")
    words = ["--user-dir", PLUGIN, *SIZES, "--max-update", 1, "--save-dir", tmp_path / "new"]
    words += ["--subword-sampling", 0.1, *TASKS["multilingual"]]
    refused(run("fairseq-train", folder, *words, check=False), folder / "spm.model")


def test_pieces_are_joined_once_however_it_is_asked(data, tmp_path):
    """fairseq joins by --remove-bpe and --bpe one after the other, which takes the blanks, too."""
    words = ["--user-dir", PLUGIN, "--cpu", "--num-workers", 0, *TASKS["bilingual"]]
    training = [*SIZES, "--max-update", 1, "--save-dir", tmp_path]
    run("fairseq-train", data, *words, *training)
    words += ["--path", tmp_path / "checkpoint_last.pt", "--beam", 1, "--max-len-b", 8]
    words += ["--gen-subset", "valid", "--scoring", "sacrebleu", "--max-source-positions", 1024]
    bpe = ["--bpe", "sentencepiece", "--sentencepiece-model", data / "spm.model"]
    first, *others = (
        [
            line
            for line in run("fairseq-generate", data, *words, *how).stdout.splitlines()
            if line.startswith(("T-", "H-", "D-", "Generate"))
        ]
        for how in (["--remove-bpe", "sentencepiece"], bpe, ["--remove-bpe", "sentencepiece", *bpe])
    )
    assert any(" " in line.partition("\t")[2] for line in first) and "\u2581" not in "".join(first)
    assert all(other == first for other in others)


def test_refused_without_pairs_of_sentences(english, data, tmp_path):
    (english / "spm.model").write_bytes((data / "spm.model").read_bytes())
    words = ["--task", "language_modeling", "--arch", "smoe_transformer_lm_tiny", "--cpu"]
    words += ["--criterion", "smoe_label_smoothed_cross_entropy", "--max-tokens", 400, "--lr", 1]
    words += ["--subword-sampling", 0.1, "--save-dir", tmp_path, "--user-dir", PLUGIN]
    result = run("fairseq-train", english, *words, check=False)
    (english / "spm.model").unlink()
    refused(result, "--subword-sampling")

"""``smoe shortlist``: its counts, its file, the search with it, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import refused, smoe
from fairseq.data import Dictionary
from scipy import sparse
from test_beam_search import batch, sharp
from test_model import make_task

from smoe_fairseq.errors import UsageError
from smoe_fairseq.translate import packed
from smoe_fairseq.translate.make_shortlist import candidates
from smoe_fairseq.translate.search import BeamSearch, SearchOptions
from smoe_fairseq.translate.shortlist import Shortlist


def test_candidates_are_those_with_the_greatest_dice_coefficient():
    generator = np.random.default_rng(1)
    source, target = ((generator.random((40, 9)) < 0.3).astype(np.int32) for _ in range(2))
    source[:, 8] = target[:, 5] = 0  # tokens that never occur
    matrices = sparse.csr_matrix(source), sparse.csr_matrix(target)
    table, frequent = candidates(*matrices, 3, 4)
    assert candidates(*matrices, 10**20, 10**20)[0].shape == (9, 9)
    assert table.shape == (9, 3) and (table[8] == Dictionary().eos()).all()
    for s in range(8):
        dice = [
            2 * int((source[:, s] & target[:, t]).sum()) / (source[:, s].sum() + target[:, t].sum())
            for t in range(9)
        ]
        assert sorted((dice[t] for t in table[s]), reverse=True) == sorted(dice, reverse=True)[:3]
    counts = target.sum(0)
    assert sorted(counts[frequent], reverse=True) == sorted(counts, reverse=True)[:4]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_search_takes_tokens_of_the_list_alone(is_packed, monkeypatch):
    torch.manual_seed(3)
    model, task = sharp("--smoe-strata", "4-4"), make_task(96)
    size = len(task.target_dictionary)
    everything = BeamSearch(task.target_dictionary, SearchOptions(4, max_len_b=8)).generate(
        [model], batch(task)
    )
    if is_packed:
        if not packed.can_pack():
            pytest.skip("this torch has no packed products")
        monkeypatch.setattr(packed, "MIN_WEIGHTS", 0)
        packed.pack(model)

    def search(ids: list[int], **more) -> list:
        options = SearchOptions(4, max_len_b=8)
        searching = BeamSearch(task.target_dictionary, options, lambda _: torch.tensor(ids))
        return searching.generate([model], batch(task), **more)

    some = [*range(4), *range(10, size, 3)]
    for hypotheses in search(some):
        assert {i for h in hypotheses for i in h["tokens"].tolist()} <= set(some)
    prefix = torch.full((len(everything), 1), 5)  # which is not in the list
    assert all(h["tokens"][0] == 5 for each in search(some, prefix_tokens=prefix) for h in each)
    # Without one token that no hypothesis has, little changes.
    used = {i for each in everything for h in each for i in h["tokens"].tolist()}
    unused = min(set(range(4, size)) - used)
    best = [each[0]["tokens"].tolist() for each in search(sorted({*range(size)} - {unused}))]
    assert best == [each[0]["tokens"].tolist() for each in everything]


def write_pair(folder, source: str, target: str, more: int) -> Dictionary:
    """A binarised pair: the target token of each source token is ``more`` above it."""
    from fairseq.data import indexed_dataset

    dictionary = Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"w{i}")
    generator = torch.Generator().manual_seed(1)
    lines = [torch.randint(4, 20, (5,), generator=generator) for _ in range(60)]
    for language, offset in ((source, 0), (target, more)):
        dictionary.save(str(folder / f"dict.{language}.txt"))
        prefix = str(folder / f"train.{source}-{target}.{language}")
        builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionary))
        for ids in lines:
            builder.add_item(torch.cat([ids + offset, torch.tensor([2])]))
        builder.finalize(f"{prefix}.idx")
    return dictionary


def task_of(dictionary: Dictionary, source: str = "aa", target: str = "bb"):
    config = SimpleNamespace(source_lang=source, target_lang=target)
    return SimpleNamespace(cfg=config, source_dictionary=dictionary, target_dictionary=dictionary)


def test_the_file_is_that_of_its_dictionary(tmp_path):
    write_pair(tmp_path, "aa", "bb", 3)
    words = ("shortlist", tmp_path, "--candidates", 1, "--frequent", 2)
    assert "shortlist.npz: aa-bb, bb-aa" in smoe(*words).stdout
    dictionary = Dictionary.load(str(tmp_path / "dict.aa.txt"))
    language = dictionary.add_symbol("__bb__")  # as tasks of several directions do
    shortlist = Shortlist(tmp_path / "shortlist.npz", task_of(dictionary))
    ids = set(shortlist.of("aa", "bb")(torch.tensor([[1, 6, 11, 2, language]])).tolist())
    assert {0, 1, 2, 3, 9, 14, language} <= ids and len(ids) <= 9
    assert shortlist.of("aa", "cc") is None
    other = Dictionary.load(str(tmp_path / "dict.aa.txt"))
    other.symbols[7] = "other"
    with pytest.raises(UsageError, match=r"another dictionary of aa"):
        Shortlist(tmp_path / "shortlist.npz", task_of(other))
    (tmp_path / "broken.npz").write_text("no")
    content = dict(np.load(tmp_path / "shortlist.npz"))
    np.savez(tmp_path / "changed.npz", **content | {"aa-bb": content["aa-bb"] + 100_000})
    for name in ("broken.npz", "changed.npz"):
        with pytest.raises(UsageError, match="broken.npz|changed.npz"):
            Shortlist(tmp_path / name, task_of(dictionary))
    with pytest.raises(UsageError, match="No such file"):
        Shortlist(tmp_path / "none.npz", task_of(dictionary))
    taken = ("--output", tmp_path / "dict.aa.txt")
    refused(smoe(*words, *taken, check=False), *taken)
    (tmp_path / "empty").mkdir()
    result = smoe("shortlist", tmp_path / "empty", check=False)
    refused(result, "has no training data: expected")


def test_a_direction_has_the_counts_of_its_own_text(tmp_path):
    """Of both orders of a pair, and of a code with a hyphen."""
    write_pair(tmp_path, "aa", "zh-CN", 3)
    dictionary = write_pair(tmp_path, "zh-CN", "aa", 1)
    smoe("shortlist", tmp_path, "--candidates", 1, "--frequent", 1)
    for source, target, more in (("aa", "zh-CN", 3), ("zh-CN", "aa", 1)):
        task = task_of(dictionary, source, target)
        shortlist = Shortlist(tmp_path / "shortlist.npz", task).of(source, target)
        for token in (6, 9, 12):
            assert token + more in shortlist(torch.tensor([[token]]))
    (tmp_path / "train.zh-CN-aa.aa.idx").unlink()
    result = smoe("shortlist", tmp_path, "--output", tmp_path / "other.npz", check=False)
    refused(result, "train.zh-CN-aa.")


def test_all_shards_count(tmp_path):
    for number, more in enumerate((1, 2)):
        (tmp_path / f"shard{number}").mkdir()
        dictionary = write_pair(tmp_path / f"shard{number}", "aa", "bb", more)
    smoe("shortlist", tmp_path, "--candidates", 2, "--frequent", 1)
    shortlist = Shortlist(tmp_path / "shortlist.npz", task_of(dictionary)).of("aa", "bb")
    for token in (6, 9, 12):
        assert {token + 1, token + 2} <= set(shortlist(torch.tensor([[token]])).tolist())

"""From raw text to scores: what a small run prepares, trains, translates and keeps when it is interrupted."""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import yaml
from commands import (
    PLUGIN,
    bash_torchrun,
    changed,
    contents,
    refused,
    run_step,
    smoe,
    step_here,
    succeeded,
)
from commands import run as run_program
from test_lock import holder
from test_recipes import recipe, refusal, surroundings, table, write_dataset

from smoe_fairseq import locks
from smoe_fairseq.journal import Journal
from smoe_fairseq.recipes.datasets import load_dataset
from smoe_fairseq.recipes.evaluation import scores
from smoe_fairseq.recipes.evaluation.evaluate import evaluate, plan
from smoe_fairseq.recipes.evaluation.evaluation import Evaluation
from smoe_fairseq.recipes.evaluation.external import comet
from smoe_fairseq.recipes.settings import Settings


@pytest.fixture(scope="module")
def printed(prepared) -> dict[str, SimpleNamespace]:
    """What each recipe printed."""
    content = json.loads((prepared / "said.json").read_text())
    return {name: SimpleNamespace(**each) for name, each in content.items()}


@pytest.fixture
def scored(prepared, tmp_path):
    """A folder with the run of ``prepared``, evaluated, and a stand-in for ``comet-score``."""
    for name in ("configs", "data", "runs"):
        shutil.copytree(prepared / name, tmp_path / name, symlinks=True)
    write_comet(tmp_path)
    return tmp_path


@pytest.fixture
def unevaluated(scored):
    """A folder with the run of ``prepared``, as it was before it was evaluated."""
    shutil.rmtree(scored / "runs/tiny/smoe-2-2/test")
    (scored / "runs/tiny/smoe-2-2/scores.json").unlink()
    return scored


def copied_as(run: Path, method: str) -> None:
    """A copy of a run, as if it were another method's."""
    copy = shutil.copytree(run, run.with_name(method))
    content = json.loads((copy / "identity.json").read_text())
    (copy / "identity.json").write_text(json.dumps(content | {"method": method}))


def test_a_copy_of_a_run_is_no_second_seed(prepared, tmp_path):
    for name in ("smoe-2-2", "smoe-2-2.seed-7"):
        shutil.copytree(prepared / "runs/tiny/smoe-2-2", tmp_path / "tiny" / name)
    given = {"CONFIG_DIR": str(prepared / "configs"), "RUN_DIR": str(tmp_path)}
    lines = recipe(prepared, "table", "tiny", **given).stdout.splitlines()
    (note,) = [line for line in lines if "--seed 1, not with --seed 7" in line]
    assert note.startswith("smoe-2-2.seed-7: ")


def test_prepared_text_is_the_raw_text(prepared, printed):
    from fairseq.data import Dictionary, data_utils

    binary = prepared / "data/tiny/bin"
    dictionaries = {(binary / f"dict.{lang}.txt").read_text() for lang in ("en", "fr", "de")}
    assert dictionaries == {(binary / "dict.txt").read_text()}
    dictionary = Dictionary.load(str(binary / "dict.txt"))
    for split, language in (("train", "en"), ("valid", "fr"), ("test", "fr")):
        name = f"{split}.en-fr.{language}"
        data = data_utils.load_indexed_dataset(str(binary / name), dictionary)
        decoded = [dictionary.string(line, "sentencepiece") for line in data]
        assert decoded == (prepared / "data/tiny/raw" / name).read_text().splitlines()
        assert decoded == [
            " ".join(x.split()) for x in open(prepared / "text" / name, newline="\n")
        ]
    assert not list(prepared.glob("data/**/*.partial"))
    assert "prepared already" in printed["again"].stdout
    assert "prepared with other" not in printed["train"].stderr


def test_a_dictionary_that_was_changed_since_is_refused(prepared, tmp_path):
    """Wherever it is read: numbers in the binarised text would stand for other words."""
    from fairseq.data import Dictionary

    binary = shutil.copytree(prepared / "data/tiny/bin", tmp_path / "bin")
    changed = binary / "dict.en.txt"
    Dictionary.load(str(changed))
    changed.write_text("".join(sorted(changed.read_text().splitlines(True))))
    words = [binary, *"-s en -t fr --arch smoe_transformer_tiny --user-dir".split(), PLUGIN]
    words += ["--max-update", 1, "--max-tokens", 900, "--cpu", "--save-dir", tmp_path / "run"]
    refused(run_program("fairseq-train", *words, check=False), changed)
    Dictionary.load(str(binary / "dict.fr.txt"))


def test_a_changed_data_set_is_not_prepared_already(prepared, tmp_path):
    shutil.copytree(prepared / "data", tmp_path / "data")
    raw = shutil.copytree(prepared / "text", tmp_path / "text")
    given = {"CONFIG_DIR": str(prepared / "configs"), "DATA_DIR": str(tmp_path / "data")}
    (tmp_path / "data/tiny/raw/train.en-de.de").unlink()  # for room; what is there is the same
    (raw / "notes.txt").touch()
    same = recipe(tmp_path, "prepare", "tiny", RAW=str(raw), **given)
    assert same.returncode == 0 and "prepared already" in same.stdout
    dry = recipe(tmp_path, "prepare", "tiny", "--dry-run", RAW=str(raw), **given)
    assert dry.returncode == 0 and dry.stdout == f"# {same.stdout}"
    before = contents(tmp_path / "data/tiny/raw")

    def told(*words, **more):
        sentence = refusal(recipe(tmp_path, "prepare", "tiny", *words, **given, **more))
        assert f"{tmp_path}/data/tiny/bin" in sentence
        assert contents(tmp_path / "data/tiny/raw") == before
        return sentence

    assert "subwords" in told("--vocab-size", "50")
    changed = raw / "train.en-fr.fr"
    changed.write_text(changed.read_text()[::-1])  # of the same size
    assert "RAW" in told(RAW=str(raw))
    changed.rename(changed.with_suffix(".notes"))  # other text comes in its place
    changed.with_suffix(".fr.gz").write_bytes(gzip.compress(b"un\n" * 8))
    assert "RAW" in told(RAW=str(raw))
    changed = tmp_path / "data/tiny/raw/test.en-fr.fr"
    changed.write_text(changed.read_text()[::-1])
    before = contents(tmp_path / "data/tiny/raw")
    assert "raw/" in told()
    keep, train = {"keep": ["en-es"]}, {"train": {"max-source-positions": 40}}
    for name, more in (("`keep`", keep), ("`max-source-positions`", train)):
        given |= configured(tmp_path / name, prepared, **more)
        assert name in told()
    given |= configured(tmp_path / "clean", prepared, clean={"equal": "drop"})
    edited = recipe(tmp_path, "train", "tiny", "smoe-2-2", "--no-such-flag", **given)
    assert edited.returncode == 2 and "was prepared with other `clean`" in edited.stderr  # not anew


def configured(folder: Path, prepared: Path, **more) -> dict[str, str]:
    """The environment that selects the data set of ``prepared`` with other settings."""
    content = yaml.safe_load((prepared / "configs/datasets/tiny.yaml").read_text())
    return write_dataset(folder, "tiny", **content | more)


def test_text_of_a_pair_that_was_removed_is_not_used(prepared, tmp_path):
    """It stays in raw/, and the subwords are those of a data set that never had it."""
    given = configured(tmp_path / "c", prepared, pairs=["en-fr"])
    for name in ("with", "without"):
        raw = shutil.copytree(prepared / "data/tiny/raw", tmp_path / name / "tiny/raw")
        for file in raw.glob("*.en-de.*") if name == "without" else ():
            file.unlink()
        succeeded(recipe(tmp_path, "prepare", "tiny", DATA_DIR=name, **given))
    found = [contents(tmp_path / name / "tiny/bin") for name in ("with", "without")]
    assert found[0] == found[1]


def test_codes_of_languages_that_were_exchanged_are_refused(prepared, tmp_path):
    """Text of one language would be trained and scored as another's. A pair may still be left out."""
    raw, number = prepared / "text", iter(range(9))

    def step(*words, **more):
        given = configured(tmp_path / f"c{next(number)}", prepared, **more)
        return recipe(tmp_path, *words, RAW=str(raw), **given)

    codes = {"en": "swh", "fr": "eng", "de": "deu"}
    succeeded(step("prepare", "tiny", languages=codes))
    left = {"pairs": ["en-fr"], "languages": {"en": "swh", "fr": "eng"}}
    assert "prepared already" in step("prepare", "tiny", **left).stdout
    mended = {"pairs": ["en-fr"], "languages": {"en": "eng", "fr": "swh"}}
    words = ("prepare tiny", "train tiny smoe-2-2", "evaluate tiny smoe-2-2 --dry-run")
    for command in words:
        sentence = refusal(step(*command.split(), **mended))
        assert "`languages: {en: swh}`" in sentence and "data/tiny/raw" in sentence
    record = tmp_path / "data/tiny/raw/.settings.json"
    record.rename(tmp_path / "record")  # the folder may be the user's own
    assert "data/tiny/raw" not in refusal(step("prepare", "tiny", **mended))
    (tmp_path / "record").rename(record)
    shutil.rmtree(tmp_path / "data/tiny/bin")
    raw = ""
    assert "`languages: {en: swh}`" in refusal(step("prepare", "tiny", **mended))


def test_settings_that_text_does_not_follow_are_refused(prepared, tmp_path):
    """Text that is there, gathered or not, is not gathered again; what others binarised not at all."""
    own = {"pairs": ["en-fr"], "raw": {}, "experts": 4}
    shutil.copytree(prepared / "text", tmp_path / "text")
    number = iter(range(9))

    def prepare(base: dict = own, **settings):
        given = write_dataset(
            tmp_path / f"c{next(number)}", "own", **base, **settings.pop("set", {})
        )
        given |= {"DRY_RUN": "1", **settings}
        return step_here("prepare", "own", cwd=tmp_path, **given)

    clean = {"clean": {"equal": "drop"}}
    given = write_dataset(tmp_path / "c", "own", **own, **clean)
    words = ("gather", "own", tmp_path / "text", tmp_path / "data/own/raw")
    succeeded(run_step(*words, cwd=tmp_path, **given))
    succeeded(prepare(own | {"raw": {"archives": [{"url": "http://a/b"}]}}, set=clean))
    assert "`raw`" in refusal(prepare(own | {"raw": {"split": "hash"}}, set=clean))
    assert "`clean`" in refusal(prepare())
    succeeded(prepare(RAW="text"))
    (tmp_path / "data/own/raw/.settings.json").unlink()
    succeeded(prepare())
    assert "`clean`" in refusal(prepare(set=clean))
    assert "`source.datasets`" in refusal(prepare(RAW="text", set={"source": {"datasets": "opus"}}))
    archive = {"text": "bin", "test": "test.{pair}.{language}", "vocabulary": "spm.model"}
    binarised = own | {"raw": {"binarised": archive, "archives": [{"url": "http://a/b"}]}}
    shutil.rmtree(tmp_path / "data")
    succeeded(prepare(binarised))
    assert "`clean`" in refusal(prepare(binarised, set=clean))


def test_a_refused_preparation_leaves_no_folder(tmp_path):
    assert "--raw" in refusal(recipe(tmp_path, "prepare", "phrasebook", "--raw", "nowhere"))
    assert not (tmp_path / "data/phrasebook").exists()
    (tmp_path / "scratch").symlink_to("unmounted")
    result = recipe(tmp_path, "prepare", "phrasebook", DATA_DIR="scratch")
    assert "unmounted" in refused(result, "scratch")


def test_scores_are_those_of_the_translations_against_raw_references(prepared, printed):
    run = prepared / "runs/tiny/smoe-2-2"
    content = json.loads((run / "scores.json").read_text())
    assert list(content["scores"]) == ["fr-en", "en-fr"]
    for direction, score in content["scores"].items():
        target = direction.split("-")[1]
        generated = (run / "test" / direction / "generate-test.txt").read_text().splitlines()
        found = [line.split("\t") for line in generated if line.startswith("D-")]
        ordered = [text for _, _, text in sorted(found, key=lambda words: int(words[0][2:]))]
        assert (run / f"test/{direction}.txt").read_text().splitlines() == ordered
        references = (prepared / f"text/test.en-fr.{target}").read_text().split("\n")[:-1]
        bleu = sacrebleu.corpus_bleu(ordered, [references], force=True)
        expected = bleu.score
        assert score["bleu"] == pytest.approx(expected, abs=0.005)
        assert score["sentences"] == 12 and "tok:13a" in score["signature"]
        assert score["length_ratio"] == pytest.approx(bleu.sys_len / bleu.ref_len, abs=0.0005)
        said = f"# {direction}: BLEU {expected:.2f}, {score['length_ratio']:.2f} times the references' length"
        assert said in printed["evaluate"].stdout
        warned = re.search(f"the translations of .*{direction}.* are", printed["evaluate"].stderr)
        assert bool(warned) == (not 0.8 <= score["length_ratio"] <= 1.2)
    assert content["checkpoint"] == "checkpoint_best.pt"
    assert content["generate"].endswith("--beam 2")
    assert not (run / "test.partial").exists()
    chrf = sacrebleu.corpus_chrf(ordered, [references], word_order=2).score
    found = content["scores"]["en-fr"]["others"]["chrF++"]
    assert found[0] == pytest.approx(chrf, abs=0.005) and "nw:2" in found[1]


def test_a_score_without_lengths_is_shown_without():
    """As in files from before they were kept."""
    assert str(scores.Score(30.0, "s", 3)) == "BLEU 30.00"
    assert str(scores.Score(30.0, "s", 3, 1.234)) == "BLEU 30.00, 1.23 times the references' length"
    odd = [
        r for r in (0.7, 0.8, 1.0, 1.2, 1.3, None) if scores.Score(30.0, "s", 3, r).has_odd_length
    ]
    assert odd == [0.7, 1.3]


def test_direction_without_test_data_is_reported_and_left_out(printed):
    assert "test.en-de" in printed["prepare"].stderr
    assert all(f"warning: {d}" in printed["evaluate"].stderr for d in ("de-en", "en-de"))
    assert "| smoe-2-2 |" in printed["table"].stdout.splitlines()[4]
    header, _, row, *_ = printed["table"].stdout.splitlines()[2:]
    assert "de" not in header.split() and " - |" not in row


@pytest.mark.soak
def test_experts_of_several_processes_are_evaluated_as_those_of_one(prepared):
    given = dict(CONFIG_DIR=str(prepared / "configs"), RUN_DIR="sharded", OMP_NUM_THREADS="1")
    given |= bash_torchrun()
    flags = ["--cpu", "--expert-parallel", "--max-update", "3"]
    succeeded(recipe(prepared, "train", "tiny", "smoe-2-2", *flags, GPUS="2", **given))
    run = prepared / "sharded/tiny/smoe-2-2"
    assert (run / "checkpoint_best-rank-1.pt").exists()
    for consolidated in (True, False):  # again only when there is something newer
        evaluated = recipe(prepared, "evaluate", "tiny", "smoe-2-2", "--cpu", **given)
        assert ("in one checkpoint" in evaluated.stdout) == consolidated
    (run / "checkpoint_best-rank-1.pt").touch()
    evaluated = recipe(prepared, "evaluate", "tiny", "smoe-2-2", "--cpu", **given)
    assert "in one checkpoint" not in evaluated.stdout and "(translated before)" in evaluated.stdout
    for file in run.glob("checkpoint_best-rank-*.pt"):  # as rsync -a brings newer ones
        changed(file, file, lambda state: state["extra_state"].update(newer=True))
        os.utime(file, (1, 1))
    evaluated = recipe(prepared, "evaluate", "tiny", "smoe-2-2", "--cpu", **given)
    assert "in one checkpoint" in evaluated.stdout and "(translated before)" not in evaluated.stdout
    assert list(json.loads((run / "scores.json").read_text())["scores"]) == ["fr-en", "en-fr"]


def test_training_shows_a_few_lines_and_logs_the_rest(prepared, printed):
    log = (prepared / "runs/tiny/smoe-2-2/train.log").read_text()
    assert log.startswith("$ fairseq-train ") and "requested_capacity" in log
    screen = printed["train"].stdout
    assert re.search(r"update 60 of 60 \| validation loss [\d.]+ \(best\) \| saved", screen)
    assert not re.search("INFO|requested_capacity|tensorboardX|fairseq-train", screen)
    assert all(len(result.stdout.splitlines()) < 20 for result in printed.values())


@pytest.mark.soak
def test_spbleu_is_computed_where_its_tokenizer_is_there(unevaluated, prepared):
    """By sacreBLEU's place for it, also of what is scored already; BLEU stays what it was."""
    run = unevaluated / "runs/tiny/smoe-2-2"
    expected = result_of(prepared / "runs/tiny/smoe-2-2")
    given = {"SACREBLEU": str(unevaluated / "sacrebleu")}
    succeeded(evaluate_again(unevaluated, **given))
    (run / "scores.json").unlink()  # as advised where it is damaged
    succeeded(evaluate_again(unevaluated, **given))
    assert result_of(run) == expected
    models = unevaluated / "sacrebleu/models"
    models.mkdir(parents=True)
    stand_in = models / "flores200sacrebleuspm"
    shutil.copyfile(unevaluated / "data/tiny/bin/spm.model", stand_in)
    evaluated = succeeded(evaluate_again(unevaluated, **given))
    assert evaluated.stdout.count("(translated before)") == 2
    found = result_of(run)
    points, signature = found["scores"]["fr-en"]["others"].pop("spBLEU")
    assert "tok:flores200" in signature and 0 <= points <= 100
    del found["scores"]["en-fr"]["others"]["spBLEU"]
    assert found == expected
    configs = {"CONFIG_DIR": str(unevaluated / "configs")}
    printed = smoe("table", "tiny", "--metric", "spbleu", cwd=unevaluated, **configs).stdout
    assert f"| {points:.2f} |".replace(" ", "") in printed.replace(" ", "")


# Interruption


def test_a_run_whose_best_checkpoint_is_still_to_come(unevaluated):
    run = unevaluated / "runs/tiny/smoe-2-2"
    (run / "checkpoint_best.pt").unlink()
    ended = refusal(evaluate_again(unevaluated))
    training = holder(run)
    trained = refusal(evaluate_again(unevaluated))
    training.communicate()
    assert all(
        "checkpoint_best.pt" in said and "--checkpoint last" in said for said in (ended, trained)
    )
    assert ended != trained


def result_of(run: Path) -> dict:
    content = json.loads((run / "scores.json").read_text())
    del content["date"]
    return content


def evaluate_again(folder: Path, *flags: str, **given: str) -> subprocess.CompletedProcess:
    given = {"CONFIG_DIR": str(folder / "configs"), "OMP_NUM_THREADS": "1", **given}
    return recipe(folder, "evaluate", "tiny", "smoe-2-2", "--beam", "2", *flags, **given)


def test_the_commands_of_a_dry_run_give_the_same_translations_and_scores(prepared, unevaluated):
    """As a person types them, in bash: fairseq-generate, grep, sort, cut, sacrebleu."""
    run = unevaluated / "runs/tiny/smoe-2-2"
    (run / "test.partial").mkdir()
    printed = evaluate_again(unevaluated, DRY_RUN="1").stdout
    for line in filter(lambda line: line and line[0] != "#", printed.splitlines()):
        subprocess.run(["bash", "-ec", line], cwd=unevaluated, check=True, env=surroundings())
    ours = prepared / "runs/tiny/smoe-2-2/test"
    for direction in ("en-fr", "fr-en"):
        for name in (f"{direction}.txt", f"{direction}.json"):
            assert (run / "test.partial" / name).read_text() == (ours / name).read_text()
        files = (
            folder / direction / "generate-test.txt" for folder in (ours, run / "test.partial")
        )
        for one, other in zip(*map(lines_of, files), strict=True):
            (kind, *words), (other_kind, *other_words) = one.split("\t"), other.split("\t")
            assert kind == other_kind and (kind[0] == "P" or words[-1] == other_words[-1])
            numbers = (list(map(float, each[0].split())) for each in (words, other_words))
            assert next(numbers) == pytest.approx(next(numbers), abs=2e-4)  # sums in another order


def lines_of(file: Path) -> list[str]:
    """Those of hypotheses, by sentence."""
    found = [line for line in file.read_text().splitlines() if re.match(r"[HDP]-\d", line)]
    return sorted(found, key=lambda line: int(line[2:].split("\t")[0]))


def test_an_interrupted_evaluation_goes_on_with_what_is_left(unevaluated, monkeypatch, capsys):
    """Of directions and of sentences, in the batches of an uninterrupted one, by which translations differ.

    So they do where the capacity of experts is limited.
    """
    monkeypatch.chdir(unevaluated)
    monkeypatch.setenv("CONFIG_DIR", str(unevaluated / "configs"))
    run, append = unevaluated / "runs/tiny/smoe-2-2", Journal.append
    limited = ("--beam", "2", "--batch-size", "3")
    limited += ("--model-overrides", "{'moe_eval_capacity_factor': 0.3}")

    def evaluate_all() -> str:
        evaluate(load_dataset("tiny"), "smoe-2-2", limited)
        return capsys.readouterr().out

    evaluate_all()
    whole, expected = contents(run / "test"), result_of(run)
    shutil.rmtree(run / "test")
    (run / "scores.json").unlink()

    def end(journal: Journal, part) -> None:
        append(journal, part)
        if (run / "test.partial/scores.json").exists() and journal.parts == 4:
            # Of the second direction, whose second batch has two more sentences.
            raise SystemExit(143)

    with monkeypatch.context() as interrupted, pytest.raises(SystemExit):
        interrupted.setattr(Journal, "append", end)
        evaluate_all()
    assert "ended: 1 of 2" in capsys.readouterr().out and not (run / "scores.json").exists()
    (first,) = json.loads((run / "test.partial/scores.json").read_text())["scores"]
    shown = table(unevaluated, "tiny", CONFIG_DIR=str(unevaluated / "configs"))
    assert "1 of 2 directions are scored" in shown
    assert f"{expected['scores'][first]['bleu']:.2f}" in shown
    (file,) = run.glob("test.partial/*/unfinished.jsonl")
    begin, line, *rest = file.read_text().splitlines()
    number, hypotheses = json.loads(line)
    hypotheses[0][1] = "what is not translated again"
    file.write_text("\n".join([begin, json.dumps([number, hypotheses]), *rest, '[9, [["cut o']))
    said = evaluate_all()
    assert f"# {first}: " in said and said.count("(translated before)") == 1
    done, name = contents(run / "test"), f"{file.parent.name}.txt"
    lines, before = (texts.pop(name).decode().splitlines() for texts in (done, whole))
    assert lines.pop(number) == hypotheses[0][1] and before.pop(number) and lines == before
    assert all(done[file] == whole[file] for file in whole if file.startswith(first))
    assert not (run / "test.partial").exists() and not list(run.glob("test/*/unfinished*"))


@pytest.mark.soak
def test_what_goes_wrong_in_a_translation_is_one_sentence(unevaluated):
    run = unevaluated / "runs/tiny/smoe-2-2"
    sentence = refusal(evaluate_again(unevaluated, "--lenpen", "much"))
    assert "--lenpen" in sentence and "fairseq-generate --help" in sentence
    assert "--beam" in refusal(evaluate_again(unevaluated, "--beam", 0))
    assert "--prefix-size" in refusal(evaluate_again(unevaluated, "--prefix-size", 3))
    unknown = ("--model-overrides", "{'no_such': 1}")
    assert "--model-overrides no_such" in refusal(evaluate_again(unevaluated, *unknown))
    assert "--jobs 0: expected a whole number of at least 1" in refusal(
        evaluate_again(unevaluated, JOBS="0")
    )
    checkpoint = run / "checkpoint_best.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "checkpoint_best.pt" in refusal(evaluate_again(unevaluated))
    assert not (run / "scores.json").exists() and not (run / "test").exists()


def test_what_is_not_of_this_run_is_not_scored(unevaluated, monkeypatch):
    run = unevaluated / "runs/tiny/smoe-2-2"
    shutil.copytree(run, unevaluated / "runs/tiny/smoe-2-2.seed-2")
    assert "smoe-2-2.seed-2" in refusal(evaluate_again(unevaluated, SEED="2"))
    reference = unevaluated / "data/tiny/raw/test.en-fr.fr"
    lines = reference.read_text().splitlines(keepends=True)
    reference.write_text("".join(lines[1:]))
    assert str(reference.relative_to(unevaluated)) in refusal(evaluate_again(unevaluated))
    reference.write_text("".join(lines))
    best = run / "checkpoint_best.pt"
    with monkeypatch.context() as patched:  # training replaces it before it is loaded
        name = "smoe_fairseq.recipes.evaluation.evaluate.fingerprints"
        patched.setattr(name, lambda *_: {best.name: "0ld"})
        sentence = refusal(evaluate_again(unevaluated))
    assert str(best.relative_to(unevaluated)) in sentence and "replaced" in sentence
    changed(best, best, lambda state: state["cfg"]["model"].update(smoe_strata="4"))
    sentence = refusal(evaluate_again(unevaluated))
    assert "checkpoint_best.pt" in sentence and "--smoe-strata" in sentence
    assert not (run / "scores.json").exists() and not (run / "test").exists()


def test_a_score_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data/multi30k/raw"
    raw.mkdir(parents=True)
    for name in ("test.en-de.de", "test.en-de.en", "test.en-fr.fr", "test.en-fr.en"):
        (raw / name).write_text("a b\n")
    (tmp_path / "checkpoint_best.pt").write_text("weights")
    directions = ("en-de", "en-fr")
    evaluation = Evaluation(
        load_dataset("multi30k"), tmp_path, tmp_path / "checkpoint_best.pt", directions
    )
    assert evaluation.resume() == {}
    whole = json.dumps({"name": "BLEU", "score": 30.0, "signature": "s"})
    for direction, text in zip(directions, (whole, whole[:20])):
        (evaluation.partial / f"{direction}.json").write_text(text)
        (evaluation.partial / f"{direction}.txt").write_text("a b\n")
    checksum = hashlib.sha256(b"a b\na b\n").hexdigest()
    own = hashlib.sha256(b"a b\n").hexdigest()
    score = scores.Score(30.0, "s", 1, test_checksum=checksum, checksum=own)
    assert evaluation.resume() == {"en-de": score}
    evaluation.partial.rename(evaluation.complete)
    assert evaluation.resume() == {"en-de": score}
    assert evaluation.partial.is_dir() and evaluation.complete.is_dir()


def test_what_is_translated_is_scored_again_without_the_model(scored, monkeypatch):
    """With other flags of sacreBLEU or another reference; COMET's scores depend on the latter alone."""
    monkeypatch.chdir(scored)
    monkeypatch.setenv("CONFIG_DIR", str(scored / "configs"))
    dataset, translations = load_dataset("tiny"), scored / "runs/tiny/smoe-2-2/test/fr-en.txt"
    evaluation = plan(dataset, "smoe-2-2", ("--beam", "2"), "best")
    comet = {"name": "COMET", "score": 80.0, "signature": "model:m", "sentences": [0.8]}
    translations.with_name("fr-en.comet.json").write_text(json.dumps(comet))
    first = evaluation.resume()["fr-en"]
    assert first.of("COMET") == (80.0, "model:m")
    reference = evaluation.reference("fr-en")
    reference.touch()
    wide = replace(evaluation, dataset=replace(dataset, sacrebleu={"width": 5}))
    second = wide.resume()["fr-en"]
    assert 0 < abs(second.bleu - first.bleu) < 0.01 and [*second.others] == ["COMET"]
    lines = reference.read_text().splitlines(keepends=True)
    reference.write_text("".join([translations.read_text().splitlines(True)[0], *lines[1:]]))
    third = wide.resume()["fr-en"]
    assert [*wide.scored(wide.partial)] == ["fr-en"]  # the other direction has another source
    assert third.bleu > second.bleu + 1 and not third.others
    assert replace(wide, extra=("--beam", "3")).resume() == {}


def test_two_evaluations_of_a_run_are_not_made_at_once(unevaluated):
    first = holder(unevaluated / "runs/tiny/smoe-2-2", locks.EVALUATION)
    assert "smoe-2-2 is in use by another run" in refusal(evaluate_again(unevaluated))
    first.communicate()


# In the place of unbabel-comet's program, whose model cannot be had in a test: the flags that it
# takes and the file that it writes are as in its version 2.2.7.
COMET_SCORE = """#!{python}
import json, sys

words = [word for word in sys.argv[1:] if word != "--quiet"]
given = dict(zip(words[::2], words[1::2], strict=True))
open("comet_runs", "a").write(f"{{given['--model']}} {{given.get('--gpus', 1)}}\\n")
texts = [open(given.pop(flag)).readlines() for flag in ("-s", "-t", "-r")]
segments = [dict(zip(("src", "mt", "ref"), map(str.strip, words))) for words in zip(*texts)]
for segment in segments:
    source, translation, reference = (len(segment[part]) for part in ("src", "mt", "ref"))
    segment["COMET"] = {worth} * source / (source + translation + 2 * reference + 1)
json.dump({{"translations": segments}}, open(given.pop("--to_json"), "w"))
assert given.keys() <= {{"--model", "--gpus"}}
print("score: 1.0")
"""


def write_comet(folder: Path, worth: float = 1) -> None:
    (folder / "comet-score").write_text(COMET_SCORE.format(python=sys.executable, worth=worth))
    (folder / "comet-score").chmod(0o755)


def test_comet_scores_what_is_translated_already(scored):
    given = {"COMET": f"{scored}/comet-score --gpus 0"}
    before = result_of(scored / "runs/tiny/smoe-2-2")["scores"]
    evaluated = succeeded(evaluate_again(scored, **given))
    for direction, score in result_of(scored / "runs/tiny/smoe-2-2")["scores"].items():
        points, signature = score["others"].pop("COMET")
        assert signature == "model:Unbabel/wmt22-comet-da"
        assert f"# {direction}: COMET {points:.2f}" in evaluated.stdout
        assert score == before[direction]
    # Both directions in one go, and not again; another model is another score.
    succeeded(evaluate_again(scored, **given))
    assert (scored / "comet_runs").read_text() == "Unbabel/wmt22-comet-da 0\n"
    succeeded(evaluate_again(scored, **given, COMET_MODEL="another"))
    assert (scored / "comet_runs").read_text().splitlines()[1:] == ["another 0"]
    configs = {"CONFIG_DIR": str(scored / "configs")}
    shown = smoe("table", "tiny", "--metric", "comet", cwd=scored, **configs).stdout
    assert f"{points:.2f}" in shown and "COMET model:another" in shown
    # A second run, which is worse in each line.
    other = scored / "runs/tiny/moe"
    copied_as(scored / "runs/tiny/smoe-2-2", "moe")
    for file in other.glob("test/*.comet.json"):
        result = json.loads(file.read_text())
        result["sentences"] = [value / 2 for value in result["sentences"]]
        file.write_text(json.dumps(result))
    words = ("--metric", "comet", "--compare", "moe", "smoe-2-2")
    compared = smoe("table", "tiny", *words, cwd=scored, **configs).stdout
    assert "COMET model:another" in compared and "sacreBLEU's COMET" not in compared
    (row,) = (line.split("|") for line in compared.splitlines() if line.startswith("| fr-en"))
    assert float(row[-2]) == pytest.approx(1 / 1001, abs=5e-4)


def test_each_direction_has_its_scores_by_comet(tmp_path, monkeypatch):
    """Of texts of different lengths; each line is scored with its own source and reference."""
    monkeypatch.chdir(tmp_path)
    write_comet(tmp_path)
    texts, expected = {}, {}
    for direction, lengths in (("de-en", [3, 1]), ("en-de", [2, 5, 4]), ("fr-en", [6])):
        texts[direction] = tuple(tmp_path / f"{direction}{i}" for i in range(3))
        for i, file in enumerate(texts[direction]):
            file.write_text("".join("x" * (number + i) + "\n" for number in lengths))
        expected[direction] = [n / (n + n + 1 + 2 * (n + 2) + 1) for n in lengths]
    comet([f"{tmp_path}/comet-score"], "m").score(texts, tmp_path, Settings())
    for direction, each in expected.items():
        found = json.loads((tmp_path / f"{direction}.comet.json").read_text())
        assert found["sentences"] == pytest.approx(each)
        assert found["score"] == pytest.approx(100 * sum(each) / len(each))


def test_comet_that_is_missing_or_off_its_scale_is_refused(scored):
    sentence = refusal(evaluate_again(scored, COMET="no-such-program"))
    assert "--comet no-such-program: there is no such program" in sentence
    write_comet(scored, worth=-1)
    sentence = refusal(evaluate_again(scored, COMET=f"{scored}/comet-score", COMET_MODEL="odd"))
    assert "--comet-model odd has a mean score of -0." in sentence and "between 0 and 1" in sentence
    assert not list(scored.glob("runs/tiny/smoe-2-2/test/*.comet.json"))


def test_a_dry_run_shows_the_command_of_comet(scored):
    shown = evaluate_again(scored, COMET=f"{scored}/comet-score", DRY_RUN="1").stdout
    (line,) = [x for x in shown.splitlines() if "comet-score" in x and "fr-en" in x]
    assert "--model Unbabel/wmt22-comet-da" in line
    assert line.endswith("--to_json runs/tiny/smoe-2-2/test/fr-en.comet.json")


def test_other_metrics_of_sacrebleu_and_of_any_program(scored):
    file = scored / "configs/datasets/tiny.yaml"
    content = yaml.safe_load(file.read_text())
    words, program = "awk -f length.awk {translation}", scored / "length.awk"
    program.write_text("{print length($0) - 9000}")
    content["sacrebleu"] = {**content.get("sacrebleu", {}), "metrics": ["bleu", "chrf", "ter"]}
    words_of = {"Length": words, "chrF2-x": "awk '{print 1}' {source}"}
    file.write_text(yaml.safe_dump(content | {"metrics": words_of}))
    succeeded(evaluate_again(scored))
    run = scored / "runs/tiny/smoe-2-2"
    for direction, score in result_of(run)["scores"].items():
        lines = (run / f"test/{direction}.txt").read_text().splitlines()
        mean = sum(len(line.encode()) - 9000 for line in lines) / len(lines)
        points, signature = score["others"]["Length"]
        assert signature.startswith(words) and points == pytest.approx(
            mean, abs=3
        )  # characters or bytes
        assert "tok:tercom" in score["others"]["TER"][1]
        assert score["others"]["chrF2-x"][0] == 1
    program.write_text("{print 7}")
    succeeded(evaluate_again(scored))
    assert {s["others"]["Length"][0] for s in result_of(run)["scores"].values()} == {7}
    copied_as(run, "moe")
    configs = {"CONFIG_DIR": str(scored / "configs")}
    for metric, name in (("ter", "TER (lower is better)"), ("length", "Length")):
        ask = ("table", "tiny", "--metric", metric)
        for more in ((), ("--compare", "moe", "smoe-2-2")):
            assert name in smoe(*ask, *more, cwd=scored, **configs).stdout
    file.write_text(yaml.safe_dump(content | {"metrics": {"Length": "echo {source}"}}))
    assert "Length" in refusal(evaluate_again(scored))

"""The built-in corpus: its text, and that it is prepared like any other data set."""

import hashlib

from test_recipes import recipe

SIZES = {"train": 4000, "valid": 100, "test": 150}
# Of all files' names and contents, as a grammar in versions up to 0.2.0 wrote them.
CHECKSUM = "175dfedd94a5326aea0764dfb6eea6bee09d1af3ab61e37a985031d117505307"


def test_text_is_that_of_earlier_versions(phrasebook):
    digest = hashlib.sha256()
    files = sorted((phrasebook / "data/phrasebook/raw").glob("[!.]*"))
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    assert len(files) == 24 and digest.hexdigest() == CHECKSUM


def test_own_text_takes_its_place(tmp_path):
    for split in SIZES:
        (tmp_path / f"{split}.tsv").write_text("eng\tnso\tmsa\ttgl\tcat\na b\tc\td e\tf\tg\n")
    done = recipe(tmp_path, "prepare", "phrasebook", RAW=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data/phrasebook/raw/test.eng-cat.cat").read_text() == "g\n"

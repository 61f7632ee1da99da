"""The built-in corpus: its text, and that it is prepared like any other data set."""

import hashlib

from commands import succeeded
from test_recipes import recipe

# Of all files' names and contents.
CHECKSUM = "175dfedd94a5326aea0764dfb6eea6bee09d1af3ab61e37a985031d117505307"


def test_text_is_that_of_earlier_versions(phrasebook):
    digest = hashlib.sha256()
    files = sorted((phrasebook / "data/phrasebook/raw").glob("[!.]*"))
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    assert len(files) == 24 and digest.hexdigest() == CHECKSUM


def test_own_text_takes_its_place(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.tsv").write_text("eng\tnso\tmsa\ttgl\tcat\na b\tc\td e\tf\tg\n")
    succeeded(recipe(tmp_path, "prepare", "phrasebook", RAW=str(tmp_path)))
    assert (tmp_path / "data/phrasebook/raw/test.eng-cat.cat").read_text() == "g\n"

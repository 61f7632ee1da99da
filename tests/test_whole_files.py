"""Files and folders of `smoe_fairseq.files`: whole or not there, whatever goes wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import contents, no_room, sentence_of
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from smoe_fairseq import files
from smoe_fairseq.errors import UsageError
from smoe_fairseq.files import whole_file, whole_files, whole_folder, write_whole


def test_text_and_bytes_take_the_place_of_what_was_there(tmp_path):
    write_whole(tmp_path / "a", "old")
    write_whole(tmp_path / "a", "neü\n")
    write_whole(str(tmp_path / "b"), b"bytes")
    assert contents(tmp_path) == {"a": "neü\n".encode(), "b": b"bytes"}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_was_there_stays_where_the_system_refuses(tmp_path, monkeypatch, fails):
    write_whole(tmp_path / "a", "old")
    monkeypatch.setattr(os, fails, no_room)
    said = sentence_of(write_whole, tmp_path / "a", "new")
    assert said.startswith(f"{tmp_path / 'a'} cannot be saved: No space left on device; ")
    assert contents(tmp_path) == {"a": b"old"}


def test_several_files_appear_together_or_not_at_all(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with whole_files(paths) as partials:
        for partial in partials:
            Path(partial).write_text("1")
        assert not any(path.exists() for path in paths)
    with pytest.raises(UsageError, match="^--output x cannot be saved: No space"):
        with whole_files(paths, called="--output x") as partials:
            Path(partials[0]).write_text("2")
            no_room()
    assert contents(tmp_path) == {"a": b"1", "b": b"1"}


def test_a_signal_that_comes_with_the_file_leaves_nothing(tmp_path, monkeypatch):
    create = os.open

    def interrupted(*arguments):
        os.close(create(*arguments))
        raise SystemExit(130)

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(SystemExit):
        write_whole(tmp_path / "a", "new")
    monkeypatch.undo()
    assert contents(tmp_path) == {}


def test_what_appeared_meanwhile_is_not_replaced(tmp_path):
    """Whether something is there is asked when the work is done, not only before it."""
    with pytest.raises(UsageError, match="^--output x "):
        with whole_files([tmp_path / "a", tmp_path / "b"], "--output x", replace=False) as partials:
            for partial in partials:
                Path(partial).write_text("new")
            (tmp_path / "b").write_text("another's")
    with pytest.raises(UsageError, match="folder "):
        with whole_folder(tmp_path / "folder") as partial:
            (partial / "file").write_text("new")
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder/mine").write_text("another's")
    assert contents(tmp_path) == {"b": b"another's", "folder/mine": b"another's"}
    with whole_file(tmp_path / "a", replace=False) as partial:
        Path(partial).write_text("new")
    assert contents(tmp_path)["a"] == b"new" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large", "missing", "latin-1"])
def test_what_cannot_be_read_whole_is_named(tmp_path, kind):
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes("abcé".encode("latin-1"))
    with pytest.raises(UsageError, match=f"^{file} "):
        files.read_plain(file, largest=3) if kind == "large" else files.read_text(file)


@pytest.mark.parametrize("writer", [whole_file, whole_folder])
def test_errors_of_other_files_are_left_as_they_are(tmp_path, writer):
    """Such as one that is read meanwhile: it is not this one that cannot be saved."""
    with pytest.raises(FileNotFoundError, match="elsewhere"), writer(tmp_path / "a"):
        open(tmp_path / "elsewhere")
    with pytest.raises(KeyError), writer(tmp_path / "a"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_folder_replaces_another_at_the_end_alone(tmp_path):
    folder = tmp_path / "above/folder"
    for text in ("old", "new"):
        with whole_folder(folder, replace=True) as partial:
            (partial / "in").mkdir()
            (partial / "in/file").write_text(text)
            assert contents(folder) == ({} if text == "old" else {"in/file": b"old"})
    assert contents(tmp_path) == {"above/folder/in/file": b"new"}
    with pytest.raises(UsageError, match="^--output x exists already"):
        with whole_folder(folder, called="--output x"):
            pass


def test_nothing_of_the_user_is_taken_for_half_written(tmp_path):
    """Names such as routing.old and model.pt.tmp are what people call their own copies."""
    others = ("routing.old", "routing.partial", "routing.smoe.old", "routing.smoe.partial")
    for name in (*(f"{other}/mine" for other in others), "routing/first"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "model.pt.tmp").write_text("mine")
    with whole_folder(tmp_path / "routing", replace=True) as partial:
        (partial / "second").write_text("new")
    write_whole(tmp_path / "model.pt", "new")
    mine = dict.fromkeys([*(f"{other}/mine" for other in others), "model.pt.tmp"], b"mine")
    assert contents(tmp_path) == {**mine, "routing/second": b"new", "model.pt": b"new"}


def test_links_with_the_names_of_half_written_files_are_not_written_through(tmp_path, monkeypatch):
    """Whoever may write to the folder could have another user's file overwritten by them."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.smoe.tmp").symlink_to(victim)
    write_whole(tmp_path / "a", "new")
    assert contents(tmp_path) == {"victim": b"mine", "a.smoe.tmp": b"mine", "a": b"new"}
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "00000000")  # guessed
    (tmp_path / f"a.smoe.{files.host()}-{os.getpid()}-00000000.tmp").symlink_to(victim)
    with pytest.raises(UsageError, match="a cannot be saved: File exists"):
        write_whole(tmp_path / "a", "newer")
    assert contents(tmp_path) == {"victim": b"mine", "a.smoe.tmp": b"mine", "a": b"new"}
    (tmp_path / f"folder.smoe.{files.host()}-{os.getpid()}-00000000.partial").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="folder "):
        with whole_folder(tmp_path / "folder"):
            pass
    assert victim.read_text() == "mine"


def ended_process() -> int:
    """Its number."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path, monkeypatch):
    pid = ended_process()
    ended, here = f"{files.host()}-{pid}", f"{files.host()}-{os.getpid()}"
    elsewhere = f"00000000-{pid}"  # whose process numbers say nothing here
    left = [f"a.smoe.{ended}-00000000.tmp", f"a.smoe.{ended}-1234abcd.tmp"]
    kept = [f"a.smoe.{here}-00000000.tmp", f"b.smoe.{ended}-00000000.tmp", "a.smoe.my-notes.tmp"]
    kept += [f"a.smoe.{elsewhere}-00000000.tmp", f"a.smoe.{pid}-00000000.tmp"]
    for name in left + kept:
        (tmp_path / name).write_text("half")
    write_whole(tmp_path / "a", "new")
    assert contents(tmp_path) == dict.fromkeys(kept, b"half") | {"a": b"new"}
    monkeypatch.setattr(files, "ABANDONED_SECONDS", -1)
    write_whole(tmp_path / "a", "new")
    assert contents(tmp_path) == dict.fromkeys(kept[:3], b"half") | {"a": b"new"}


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    """The old folder not before a new one is in place: it may be all that is left."""
    left = f"a.smoe.{files.host()}-{ended_process()}-00000000"
    for ending in ("partial", "old"):
        (tmp_path / f"{left}.{ending}/in").mkdir(parents=True)
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a"):
        1 / 0  # noqa: B018
    assert [path.suffix for path in tmp_path.iterdir()] == [".old"]
    with whole_folder(tmp_path / "a") as partial:
        (partial / "file").write_text("new")
    assert contents(tmp_path) == {"a/file": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_thousands_of_files_in_one_folder(tmp_path, monkeypatch):
    """Their folder is searched once for what killed processes left, and not for each file."""
    searched = []
    monkeypatch.setattr(Path, "glob", lambda self, pattern: searched.append(self) or [])
    with whole_files([tmp_path / str(i) for i in range(100)]) as partials:
        for partial in partials:
            Path(partial).write_text("1")
    assert searched == [tmp_path]


@pytest.mark.parametrize("append", [False, True])
def test_the_second_name_of_a_file_keeps_its_content(tmp_path, append):
    """As in a backup by ``cp -al``."""
    victim, part = tmp_path / "victim", tmp_path / "part"
    victim.write_text("mine")
    part.hardlink_to(victim)
    with files.open_plain(part, append) as file:
        file.write(b" more")
    assert victim.read_text() == "mine" and part.read_text() == "mine more"[4 * (not append) :]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_written_over_several_attempts_is_a_plain_file(tmp_path, kind):
    victim, part = tmp_path / "victim", tmp_path / "part"
    victim.write_text("mine")
    part.symlink_to(victim) if kind == "link" else os.mkfifo(part)
    reader = os.open(part, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without one cannot be opened
    for append in (False, True):
        with pytest.raises(UsageError, match="part is a link or no plain file: remove it"):
            files.open_plain(part, append)
    os.close(reader)
    assert victim.read_text() == "mine"


def test_what_is_no_file_is_written_to(tmp_path):
    """As /dev/null, which a file in its place would take from everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)


WRITERS = {  # of text, and of checkpoints as fairseq saves and copies them
    "text": lambda path: write_whole(path, "new"),
    "saved": lambda path: checkpoint_utils.torch_persistent_save("new", str(path)),
    "copied": lambda path: PathManager.copy(__file__, str(path), overwrite=True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_link_to_a_file_stays_one_unless_it_is_a_checkpoint(tmp_path, kind):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "next").symlink_to("new")
    for name in ("link", "next"):
        WRITERS[kind](tmp_path / name)
        assert (tmp_path / name).is_symlink() == (kind == "text")
        assert (tmp_path / name).read_bytes() != b"old"
    assert ((tmp_path / "file").read_text() == "old") == (kind != "text")


def test_standard_output_that_is_a_file_gets_the_content_and_stays_a_link(tmp_path):
    (tmp_path / "stdout").symlink_to("/dev/stdout")
    code = (
        "import sys; from smoe_fairseq.files import write_whole; write_whole(sys.argv[1], 'text')"
    )
    with open(tmp_path / "file", "w") as file:
        subprocess.run([sys.executable, "-c", code, tmp_path / "stdout"], stdout=file, check=True)
    assert (tmp_path / "file").read_text() == "text" and (tmp_path / "stdout").is_symlink()
    piped = subprocess.run([sys.executable, "-c", code, tmp_path / "stdout"], capture_output=True)
    assert piped.stdout == b"text", piped.stderr


def test_a_link_to_a_folder_stays_one(tmp_path):
    """Such as data/multi30k/raw on a larger disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "raw").symlink_to("disk")
    for text in ("old", "new"):
        with whole_folder(tmp_path / "raw", replace=True) as partial:
            (partial / "file").write_text(text)
    assert (tmp_path / "raw").is_symlink() and len(list(tmp_path.iterdir())) == 2
    assert contents(tmp_path / "disk") == {"file": b"new"}


@pytest.mark.parametrize("fails", ["fsync", "write", "replace"])
def test_a_folder_without_room_leaves_the_old_one(tmp_path, monkeypatch, fails):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("old")
    original = os.replace

    def refuse(source, target):
        if "partial" in str(source):
            no_room()
        original(source, target)

    if fails != "write":
        monkeypatch.setattr(files.os, fails, {"fsync": no_room, "replace": refuse}[fails])
    with pytest.raises(UsageError, match="folder cannot be saved: No space left on device"):
        with whole_folder(tmp_path / "folder", replace=True) as partial:
            (partial / "file").write_text("new")
            if fails == "write":
                no_room()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert contents(tmp_path) == {"folder/file": b"old"}


def test_a_folder_that_is_missing_or_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="none/a cannot be saved: No such file"):
        write_whole(tmp_path / "none/a", "text")
    with pytest.raises(UsageError, match="file/folder cannot be saved: Not a directory"):
        with whole_folder(tmp_path / "file/folder"):
            pass
    assert contents(tmp_path) == {"file": b"mine"}

"""Commands and code of docs/ run as they stand there, and docs/flags.md has every flag of ours."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pretrained
import pytest
from commands import run, run_python, smoe, succeeded
from test_readme import yaml_of
from test_recipes import recipe, write_dataset

ROOT = Path(__file__).parents[1]


def test_tables_of_flags_are_as_declared():
    """`python docs/flags.py` makes them anew."""
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    with_tables = runpy.run_path(str(ROOT / "docs/flags.py"))["with_tables"]
    assert with_tables(page) == page
    assert with_tables(page.replace("| `--moe-top-k` | `2` |", "| `--moe-top-k` | `3` |")) == page


@pytest.mark.soak
def test_the_table_of_methods_is_as_the_configs_say():
    """`python docs/family.py` makes it anew."""
    page = (ROOT / "docs/family.md").read_text("utf-8")
    with_table = runpy.run_path(str(ROOT / "docs/family.py"))["with_table"]
    assert with_table(page.replace("|`dense`|", "|`dens`|")) == page and "|`dense`|" in page


# What makes a command of the page take seconds; later flags take the place of earlier ones.
SMALLER = {
    "scripts/prepare.sh": "--vocab-size 320",
    "scripts/train.sh": "--max-update 2 --max-tokens 500 --num-workers 0",
    "scripts/evaluate.sh": "--beam 1 --max-len-b 5",
    "smoe translate": "--beam 2 --max-len-b 5 --device cpu",
    "smoe subwords learn": "--vocab-size 40",
    "fairseq-train": "--cpu --arch smoe_transformer_tiny --max-update 2 --max-tokens 500",
    "fairseq-generate": "--cpu --beam 1 --max-len-b 5",
}
# What makes an environment, does not end, or needs what is not there: SLURM, NLLB, other packages.
LEFT_OUT = (
    *("make setup", ". .venv/bin/activate", "smoe serve", "curl", "    -d", "scripts/slurm.sh"),
    *("fairseq-train DATA", "hf download", "smoe import nllb-moe", "smoe translate nllb.pt"),
    *("pip install", "smoe export runs/mine/dense/checkpoint_best.pt --to ctranslate2"),
)


def commands_of(page: str) -> list[str]:
    """The lines of a page's blocks of shell."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", dict.fromkeys(commands_of("docs/gpu.md")))
def test_the_commands_of_the_gpu_page(tmp_path, line):
    """test_other_ranks.py runs some in two ranks."""
    line = line.partition(" #")[0].strip()
    program, *words = re.sub(r"^MASTER_ADDR=node1 ", "", line).split()
    if program == "smoe":
        assert re.search(r"^translation +[\d,]+$", smoe(*words).stdout, re.M)
        return
    training = {"arch": "smoe_transformer_base", "lr": 0.0008, "warmup-updates": 4000}
    training |= {"max-update": 50000, "max-tokens": 4096}
    given = {"pairs": ["en-de"], "experts": 8, "raw": {}, "train": training}
    given = write_dataset(tmp_path / "configs", "mine", **given)
    given |= {"DRY_RUN": "1", "FORECAST": "0"}
    if program not in line[: len(program)]:
        given["MASTER_ADDR"] = "node1"
    done = succeeded(recipe(tmp_path, Path(program).stem, *words, **given))
    assert "fairseq-train" in done.stdout and "--save-dir runs/mine/smoe-4-4" in done.stdout
    if "--gpus 8" in line and not re.search("--(nodes|batch|max-tokens) ", line):
        assert "--nproc-per-node 8" in done.stdout and "--max-tokens 512" in done.stdout


def write_captions(folder: Path) -> None:
    """Numbers in the place of Multi30k's captions, in its files, and as text of one's own."""
    words = {"en": "number", "de": "Zahl", "fr": "nombre", "cs": "číslo"}
    folder.mkdir()
    for split, own, numbers in (
        ("train", "train", range(1000, 1300)),
        ("val", "valid", range(300, 320)),
        ("test_2016_flickr", "test", range(500, 508)),
    ):
        for language, word in words.items():
            lines = "".join(f"{word} {' '.join(str(number))}\n" for number in numbers)
            (folder / f"{split}.{language}").write_text(lines, "utf-8")
            (folder.parent / f"{own}.{language}").write_text(lines, "utf-8")


def run_commands(
    page: str, folder: Path, given: dict[str, str], smaller: dict[str, str] = SMALLER
) -> tuple[dict[str, str], set[str]]:
    """Run a page's commands with smaller models; returns outputs by first words, and `SMALLER`'s used."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = given | {"PATH": path, "GPUS": "0", "OMP_NUM_THREADS": "1", "JOBS": "1"}
    given |= {"FORECAST": "0"}
    outputs, used = {}, set()
    for line in commands_of(page):
        if line.startswith(LEFT_OUT):
            continue
        for command, flags in smaller.items():
            if line.removeprefix('echo "Ein Hund rennt." | ').startswith(command):
                before, hash_, words = line.partition("  # ")
                line = f"{before.rstrip()} {flags}"
                used.add(command)
        how = {"cwd": folder, "env": os.environ | given, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-c", line], **how)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        outputs[" ".join(line.split()[:2])] = done.stdout
    return outputs, used


@pytest.mark.soak
def test_the_commands_of_the_start_page(tmp_path):
    """Each as it stands there, in this order, with a smaller model and other text."""
    write_captions(tmp_path / "captions")
    outputs, used = run_commands("docs/start.md", tmp_path, {"RAW": str(tmp_path / "captions")})
    assert used == SMALLER.keys()
    assert outputs["scripts/evaluate.sh multi30k"].count(": BLEU ") >= 6
    assert "| smoe-2-2-2-2" in outputs["scripts/table.sh multi30k"]
    assert len(outputs['echo "Ein'].splitlines()) == 1
    assert outputs["fairseq-generate data-bin"].count("\nD-") == 8
    assert (tmp_path / "data-bin/spm.model").exists()


@pytest.mark.soak
def test_the_commands_of_fine_tuning(tmp_path, nllb):
    """With a small NLLB-200 in the place of the published one."""
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    more = "raw: {parallel: {valid: 10, test: 8}}\nvalidate: {sentences: 4}\n"
    (configs / "datasets/sw.yaml").write_text(yaml_of("docs/finetune.md", "sw") + more)
    (tmp_path / "nllb-600M").symlink_to(nllb)
    (tmp_path / "text").mkdir()
    lines = pretrained.lines(60)
    rows = "".join(f"{line}\t{line}\n" for line in lines)
    (tmp_path / "text/en-sw.tsv").write_text(rows, "utf-8")
    (tmp_path / "text.en").write_text("".join(f"{line}\n" for line in lines[:2]), "utf-8")
    smaller = {command: flags for command, flags in SMALLER.items() if "prepare" not in command}
    given = {"CONFIG_DIR": str(configs)}
    outputs, _ = run_commands("docs/finetune.md", tmp_path, given, smaller)
    assert "| pretrained " in outputs["scripts/table.sh sw"]
    assert len((tmp_path / "text.sw").read_text("utf-8").splitlines()) == 2


@pytest.mark.soak
def test_the_commands_of_the_tasks(tmp_path):
    """Those of `LEFT_OUT` apart, from top to bottom."""
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    page = (ROOT / "docs/tasks.md").read_text("utf-8")
    fine_tuned = yaml_of("docs/tasks.md", "new") + "validate: {sentences: 4, beam: 1}\n"
    for name, text in (("mine", yaml_of("README.md")), ("new", fine_tuned)):
        (configs / f"datasets/{name}.yaml").write_text(text)
    (tmp_path / "folder").mkdir()
    for language, word in (("en", "number"), ("de", "Zahl")):
        lines = [f"{word} {' '.join(str(number))}\n" for number in range(1000, 1400)]
        (tmp_path / f"folder/{language}.txt").write_text("".join(lines))
        for name in ("text", "other"):
            (tmp_path / f"{name}.{language}").write_text("".join(lines[:2]))
    (code,) = re.findall(r"```python\n# cosine.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "cosine.py").write_text(code)
    smaller = {c.replace("prepare.sh", "prepare.sh mine"): flags for c, flags in SMALLER.items()}
    outputs, _ = run_commands("docs/tasks.md", tmp_path, {"CONFIG_DIR": str(configs)}, smaller)
    assert "en-de: BLEU" in outputs["scripts/evaluate.sh mine"]
    assert len((tmp_path / "other.txt").read_text().splitlines()) == 2
    assert "smoe-4-4" in outputs["smoe table"]
    for folder in ("runs/new/smoe-4-4", "upcycled/mine/smoe-4-4"):
        assert (tmp_path / folder / "checkpoint_last.pt").is_file()


def test_the_gate_of_the_tasks(tmp_path):
    """The file and the method that docs/tasks.md adds, outside of the package."""
    page = (ROOT / "docs/tasks.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n# cosine.py\n(.*?)```", page, re.DOTALL)
    (method,) = re.findall(r"```yaml\n(plugins:.*?)```", page, re.DOTALL)
    configs = tmp_path / "configs"
    shutil.copytree(ROOT / "configs", configs)
    (configs / "cosine.py").write_text(code)
    (configs / "methods/moe-cosine.yaml").write_text(method)
    words = ("train", "phrasebook", "moe-cosine", "--dry-run", "--gpus", "0")
    said = run("smoe", *words, cwd=tmp_path, CONFIG_DIR=str(configs)).stdout
    assert f":{configs / 'cosine.py'}" in said and "--moe-gate cosine" in said
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import cosine, torch
from smoe_fairseq.modules import StratifiedMoE
torch.manual_seed(0)
block = StratifiedMoE(16, 32, strata="2-2", gate="cosine")
x = torch.randn(4, 5, 16)
y, stats = block(x)
(y.sum() + stats.balance_loss).backward()
assert all(gate.scale.grad is not None for gate in block.gates)
gate = block.eval().gates[0]
h = block.layer_norms[0](x.reshape(-1, 16))
want = gate.scale * torch.nn.functional.cosine_similarity(h.unsqueeze(1), gate.weight, dim=2)
assert torch.equal(gate(h).first_choice_T, want.argmax(1))
with torch.inference_mode():
    y, _ = block(x, with_stats=False)
    assert torch.allclose(y, block(x)[0], atol=1e-6)
"""
    succeeded(run_python(program, configs))

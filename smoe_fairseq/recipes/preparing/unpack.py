"""A data set's archives: of each only the files that ``raw.files`` asks for, under these names."""

from pathlib import Path

from smoe_fairseq.recipes.preparing.archives import extract
from smoe_fairseq.recipes.preparing.layout import all_publisher_names
from smoe_fairseq.settings.dataset import Dataset
from smoe_fairseq.system.errors import UsageError
from smoe_fairseq.system.files import whole_folder


def unpack(dataset: Dataset, archives: list[Path], target: Path) -> None:
    """Writes the data set's files, out of zip or tar archives of any compression, to ``target``.

    ``target`` appears when all archives are done. One that is missing is a `UsageError`, as is what `extract`
    refuses.
    """
    if target.exists():
        print(f"{target} is unpacked already: delete it to unpack it again", flush=True)
        return
    names = {name for names in all_publisher_names(dataset) for name in names}
    names |= {f"{name}.gz" for name in names}
    for archive in archives:
        if not archive.is_file():
            raise UsageError(
                f"{archive} is missing: run scripts/prepare.sh {dataset.name} to fetch it"
            )
    with whole_folder(target) as partial:
        wanted = {name: partial / name for name in names}
        counts = {archive: extract(archive, wanted) for archive in archives}
    for archive, count in counts.items():
        print(f"{archive}: {count} files unpacked", flush=True)

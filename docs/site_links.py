"""A hook of MkDocs for links from docs/ to the rest of the repository.

Pictures there become files of the site; other links become plain text.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PICTURES = ("results/**/*.png", "benchmarks/results/**/*.png")


def on_files(files, config):
    for pattern in PICTURES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, **_):
    markdown = re.sub(r"(!\[[^\]]*\]\()\.\./", r"\1", markdown)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)\s]+\)", r"\1", markdown)

"""A hook of MkDocs for links between docs/ and the rest of the repository.

README.md becomes the home page; CONTRIBUTING.md and the reports of results become pages, pictures
elsewhere files of the site. Links to other files of the repository become plain text.
"""

import os.path
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "results/*/*.md", "benchmarks/results/**/*.md")
PICTURES = ("results/**/*.png", "benchmarks/results/**/*.png")


def on_files(files, config):
    for pattern in (*PAGES, *PICTURES):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = Path(page.file.abs_src_path).parent

    def link(match):
        mark, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path:
            return match[0]
        whole = (folder / path).resolve()
        for root in (Path(config.docs_dir), ROOT):
            name = whole.relative_to(root).as_posix() if whole.is_relative_to(root) else ""
            if name and files.get_file_from_path(name):
                name = os.path.relpath(name, Path(page.file.src_uri).parent)
                return f"{mark}[{text}]({name}{hash_}{anchor})"
        return match[0] if not whole.exists() else text

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, markdown)

"""One HTML page with everything in it: no file beside it, no network."""

import base64
import html
import string
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Section:
    """One picture of the report.

    Args:
        name: of the file, ``NAME.png``.
        title: what the picture shows.
        finding: what it says here, in a sentence.
        reading: how to read it.
    """

    name: str
    title: str
    finding: str
    reading: str


PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 54rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #111;
  background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.reading { color: #555; font-size: .9rem; }
figure { margin: .8rem 0; overflow-x: auto; }
img { display: block; width: 100%; min-width: 34rem; max-width: 54rem; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid #ddd; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
</style>
</head>
<body>
<h1>$title</h1>
<p>The requested capacity (RC) of a token is the number of strata that it stops at in a block. All numbers
are of text; special tokens (language tokens, &lt;/s&gt;, &lt;unk&gt;) are counted apart, in the CSV
files. Layers, strata and experts are numbered from 0, as in the checkpoint.</p>
<div class="table"><table>
$description
</table></div>
$sections
</body>
</html>
""")


def page(title: str, description: dict[str, object], sections: list[Section], folder: Path) -> str:
    """The report; pictures are read from ``folder``."""
    rows = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in description.items()
    )
    parts = [_section(section, folder) for section in sections]
    return PAGE.substitute(title=html.escape(title), description=rows, sections="\n".join(parts))


def _section(section: Section, folder: Path) -> str:
    content = (folder / f"{section.name}.png").read_bytes()
    image = base64.b64encode(content).decode()
    title, finding, reading = map(html.escape, (section.title, section.finding, section.reading))
    return (
        f'<section id="{section.name}">\n<h2>{title}</h2>\n<p>{finding}</p>\n'
        f'<figure><img alt="{title}" src="data:image/png;base64,{image}"></figure>\n'
        f'<p class="reading">{reading}</p>\n</section>'
    )

"""A hook of mkdocs: pages may link to files of the repository that are not on the site.

Such a link becomes the file's path, set as code, since the site does not know where the repository is read. One that
leads nowhere is an error, as for any other link of the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_INLINE = re.compile(r"\[([^\]]*)\]\(((?:\.\./|results\b)[^)\s#]*)(?:#[^)\s]*)?\)")
_REFERENCE = re.compile(r"^\[([^\]]+)\]: (\.\./\S+)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links that leave the folder of the site by what they lead to."""
    folder = Path(config.docs_dir) / Path(page.file.src_uri).parent
    root = Path(config.docs_dir).parent

    def path_of(link: str) -> Path:
        path = (folder / link).resolve()
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {link}, which is not there")
        return path.relative_to(root.resolve())

    def inline(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path = path_of(link)
        if (folder / link).resolve().is_file() and (folder / link).resolve().is_relative_to(Path(config.docs_dir)):
            return match[0]  # a picture, or a page
        return text if text.strip("`") == path.name else f"{text} (`{path}`)"

    references = _REFERENCE.findall(markdown)
    markdown = _REFERENCE.sub("", markdown)
    for name, link in references:
        path_of(link)
        markdown = markdown.replace(f"[{name}]", name)
    return _INLINE.sub(inline, markdown)

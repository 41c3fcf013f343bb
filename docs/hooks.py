"""What the site does to pages: files of the repository that are no pages are named, not linked."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with links out of docs/ turned into file names."""
    return re.sub(
        r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", r"\1 (`\2` in the repository)", markdown
    )

"""HTML, e-books and Markdown: what is shown, and how headings part them."""

from __future__ import annotations

import pytest

from cocktail.document import Document, read_document
from tests.cocktail.office_files import epub


def read(text: str | bytes, path: str = "in.html") -> Document:
    return read_document(path, data=text.encode() if isinstance(text, str) else text)


def sections(document: Document) -> list[tuple[str, str]]:
    return [(page.label, page.text) for page in document.pages]


def test_headings_part_a_web_page() -> None:
    document = read("<title>Site</title><p>Menu<h1>Birds</h1><p>All.<h2>Ducks</h2>Swim.<h2>Owls</h2><h3>Food</h3>Mice")
    assert document.unit == "section"
    assert sections(document) == [
        ("Site", "Site\n\nMenu"),
        ("Birds", "# Birds\n\nAll."),
        ("Birds > Ducks", "## Ducks\n\nSwim."),
        ("Birds > Owls > Food", "## Owls\n\n### Food\n\nMice"),
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<p>one\n  <b>two</b> <p>three<br>four &amp; &lt;five&gt;", "one\ntwo\n\nthree\nfour & <five>"),
        ("<pre>a\n  b</pre>", "```\na\n  b\n```"),
        ("<ul><li>a<ul><li>b</ul><li>c</ul>", "- a\n  - b\n- c"),
        ("<ol start=3><li>a<li>b</ol>", "3. a\n4. b"),
        ("<table><tr><th>x<th>y<tr><td>1<td><td>3</table>", "| x | y |\n| --- | --- |\n| 1 |  | 3 |"),
        ("<table><tr><td><p>a<p>b<td>c<tr><td>d", "| a b | c |\n| --- | --- |\n| d |"),
        (
            "<table><tr><td>1<td><table><tr><td>in<td>side</table><td>3</table>",
            "1\n\n| in | side |\n| --- | --- |\n\n3",
        ),
        ("<script>x()</script><style>p{}</style><p hidden>h<p style='display: none'>n<p>seen", "seen"),
        ("<p>seen<noscript>n</noscript><template><p>t</template>", "seen"),
        ("a<div>b</div>c<hr>d", "a\n\nb\n\nc\n\n---\n\nd"),
        ("<dl><dt>Duck<dd>A bird</dl>", "Duck\n:   A bird"),
    ],
)
def test_what_a_browser_shows(body: str, text: str) -> None:
    assert read(body).text == text


@pytest.mark.parametrize(
    ("data", "path", "file_format"),
    [
        (b"<!-- saved --><!DOCTYPE html><p>a", "page.txt", "html"),
        (b"\xef\xbb\xbf <html><p>a", "-", "html"),
        ("<html><p>\u00e4".encode("utf-16"), "-", "html"),
        (b"<p>a", "page.htm", "html"),
        (b"just words", "page.html", "text"),
        (b"<p>a", "notes.txt", "text"),
        (b"<!doctype html><p><?php x ?>", "page.php", "code"),
    ],
)
def test_what_is_html(data: bytes, path: str, file_format: str) -> None:
    assert read(data, path).format == file_format


@pytest.mark.parametrize("encoding", ["iso-8859-1", "windows-1251", "shift_jis", "utf-8", "no-such-code"])
def test_declared_encodings(encoding: str) -> None:
    text = {"windows-1251": "Привет", "shift_jis": "日本"}.get(encoding, "Käse")
    codec = "utf-8" if encoding == "no-such-code" else encoding
    document = read(f'<meta http-equiv="x" content="text/html; charset={encoding}"><p>{text}'.encode(codec))
    assert document.text == text
    assert document.warnings == ()


def test_chapters_of_a_book_are_named_by_its_contents_or_headings() -> None:
    chapters = {
        "1.xhtml": "<p>It begins.&nbsp;Here&mdash;now.</p>",
        "2.xhtml": "<h1>Ducks</h1><script src='x'/><p>They swim.</p><h2>Food</h2><p>Bread.</p>",
        "3.xhtml": "<p>Unclosed <b>tags<br> here",
    }
    document = read(epub(chapters, {"1.xhtml": "Prologue", "2.xhtml": "Ducks"}), "book.epub")
    assert document.unit == "chapter"
    assert sections(document) == [
        ("Prologue", "It begins. Here—now."),
        ("Ducks", "# Ducks\n\nThey swim."),
        ("Ducks > Food", "## Food\n\nBread."),
        ("beginning", "Unclosed tags\n here"),
    ]


def test_headings_part_markdown_and_its_text_stays() -> None:
    text = "Intro\n\n# Birds\n## Ducks `x` [y](z)\nThey **swim**.\n```sh\n# no heading\n```\n\n\n# Owls #\n\nHoot.\n"
    document = read(text, "a.md")
    assert sections(document) == [
        ("beginning", "Intro"),
        ("Birds > Ducks x y", "# Birds\n## Ducks `x` [y](z)\nThey **swim**.\n```sh\n# no heading\n```"),
        ("Owls", "# Owls #\n\nHoot."),
    ]
    assert [page.unit for page in read("no headings", "a.md").pages] == ["page"]
    assert [page.unit for page in read("# one\n", "a.md").pages] == ["page"]

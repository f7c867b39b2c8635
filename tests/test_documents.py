"""The documents: links and anchors that resolve, pages that are found from the README, a README that stays short."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from lightning_shard import __version__, errors

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("configs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)

_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def _prose(document: Path) -> str:
    """The text without code blocks."""
    return _FENCE.sub("", document.read_text())


def _links(document: Path) -> list[str]:
    """The targets of the document's links and pictures that are not on the web."""
    targets = _LINK.findall(re.sub(r"`[^`\n]+`", "", _prose(document)))
    return [unquote(target) for target in targets if not re.match(r"[a-z]+:", target)]


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the document's headings: the second of the same name ends in -1."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?)\s*#*$", _prose(document), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeats = sum(1 for other in anchors if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        anchors.add(f"{slug}-{repeats}" if repeats else slug)
    return anchors


def _broken(document: Path) -> list[str]:
    """The relative links of the document that lead nowhere."""
    broken = []
    for link in _links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_every_link_and_anchor_resolves(document: Path) -> None:
    assert _broken(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `--heading`, twice\n\n# A --heading, twice\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](there.md) [b](there.md#a---heading-twice) [c](there.md#a---heading-twice-1) [d](#page) [`e`](.)\n"
        "![gone](gone.png) [`gone`](gone.md#page) [no](there.md#no-heading) `x` [no](#there)\n"
        "[a third](there.md#a---heading-twice-2) [web](https://example.com/gone) `[code](gone)`\n"
        "```md\n[code](gone)\n```\n"
    )
    assert _broken(page) == [
        "gone.png",
        "gone.md#page",
        "there.md#no-heading",
        "#there",
        "there.md#a---heading-twice-2",
    ]


def test_every_document_is_found_from_the_readme() -> None:
    found, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        document = ahead.pop()
        if document not in found:
            found.add(document)
            targets = ((document.parent / link.partition("#")[0]).resolve() for link in _links(document))
            ahead += [target for target in targets if target.suffix == ".md"]
    assert set(DOCUMENTS) - found == set()


def _missing(document: Path) -> list[str]:
    """The paths in backticks that are neither in the repository nor, as they stand or in a folder, in the package."""
    paths = set(re.findall(r"`([\w./]+(?:/|\.(?:py|yaml|md|toml)))`", _prose(document)))
    return sorted(p for p in paths if not (ROOT / p).exists() and not any((ROOT / "lightning_shard").rglob(p)))


def test_the_map_names_what_is_there() -> None:
    document = ROOT / ".github" / "CONTRIBUTING.md"
    assert len(re.findall(r"`[\w/]+\.py`", document.read_text())) > 100
    assert _missing(document) == []


def test_a_path_that_is_gone_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`mesh.py` `engines/zero/` `manifest.py` `README.md` `gone.py` `engines/gone/` `Gone.method`")
    assert _missing(page) == ["engines/gone/", "gone.py"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 220


GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    assert page.name == "api.md" or len(page.read_text().split()) <= 1500


def test_every_error_has_its_cause_and_cure() -> None:
    page = (ROOT / "examples" / "guides" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+Error)`[^|]*\|([^|]+)\|([^|]+)\|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == {name for name in vars(errors) if name.endswith("Error")}
    assert all(cause.strip() and cure.strip() for _, cause, cure in rows)


def test_the_release_has_one_version_and_a_short_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\n## {__version__} - 20" in changelog
    assert len(changelog.splitlines()) <= 120

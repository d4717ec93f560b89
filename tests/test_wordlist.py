"""The documentation and the code use none of the phrases of tools/wordlist.toml."""

import pytest
import wordlist


def test_no_file_uses_a_listed_phrase():
    assert wordlist.problems() == []


def test_the_documentation_and_the_code_are_checked(root):
    checked = wordlist.files(wordlist.LIST["files"])
    pages = {*root.glob("docs/**/*.md"), *root.glob("nca_trader/**/*.py")}
    pages |= {*root.glob("benchmarks/*.py"), *root.glob("tools/*.py")}
    pages |= {root / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")}
    pages |= {root / folder / "README.md" for folder in ("agents", "data", "envs")}
    assert {*checked} == pages


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A fault is\nmended.", [(2, "mended")]),
        ("Whoever trains", [(1, "whoever")]),
        ("a line\nof\nwhich half", [(2, "of which")]),
        ("an amendment, a spend-mend", []),
        ("a cellular automaton, and an automaton", [(1, "automaton")]),
    ],
)
def test_phrases_are_found_as_whole_words(text, found):
    assert [(line, phrase) for line, phrase, _ in wordlist.offences(text)] == found


def test_code_on_a_page_is_not_checked(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`--readout`\n```\nmend\n```\n[a](mend.md), told\n")
    assert [(line, phrase) for line, phrase, _ in wordlist.offences(wordlist.prose(page))] == [
        (5, "told")
    ]


def test_comments_and_strings_of_python_are_checked(tmp_path):
    path = tmp_path / "code.py"
    path.write_text('"""Is told.\n\nMends."""\nmend = 1  # beside\nsay = f"{mend} readout"\n')
    found = [(line, phrase) for line, phrase, _ in wordlist.offences(wordlist.prose(path))]
    assert {*found} >= {(1, "told"), (3, "mends"), (4, "beside"), (5, "readout")}
    assert (4, "mend") not in found


def test_a_phrase_is_not_its_own_remedy():
    for phrase, plain in wordlist.LIST["phrases"].items():
        assert wordlist.offences(plain) == [], phrase

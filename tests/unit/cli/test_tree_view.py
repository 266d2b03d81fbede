"""What `gyre tree` prints: one small tree word by word, and that large ones stay readable."""

import json
import re
from dataclasses import replace

import pytest
from gyre.cli.tree_view.anatomy import anatomy
from gyre.cli.tree_view.outline import letters, outline
from gyre.cli.tree_view.page import render_page, write_html
from gyre.cli.tree_view.pieces import texts
from gyre.cli.tree_view.text import Options, print_tree
from gyre.cli.tree_view.transcript import print_path
from gyre.cli.treefile import tree_from_bytes, tree_from_json
from gyre.contracts.codec import pack
from gyre.contracts.errors import BrokenBody, ConfigError
from long_execution import decode, file_of, long_tree, small_records
from well_formed import parsed

SMALL = """\
execution    g00007-003-x02  (query train-0042, group g00007-003, train)
outcome      scored, reward 0.750, advantage +0.312; harness finished
calls        9, of 2 agents
tokens       61 unique of 137 that the calls hold written out, 2.2 times as many; 5 paths, 3 roots, deepest 31
outputs      30 drawn at 27 targets, 8 trained on 2 paths
not trained  19 max_paths
weights      v3: 13 tokens, v4: 14 tokens

role          calls  sampled  paths  trained
main              6       21      2        8
main-summary      1        4      0        0
sub-agent         2        5      0        0

A  main + summary: 31 tokens to depth 31, 6 calls, 2 side branches
    tokens  calls       whose           sampled  path, or why not  weights
○   0..5    –           context
├─  5..14   #5          main                  5  path 0            v4       other prompt, leaf 4
○   5..10   –           context
├─  10..13  #1 #2       main                  3  path 1            v3       retry, leaf 3, drawn 2×
●   10..31  #0..#4 (3)  main + summary       14  max_paths         v3..v4   leaf 2

Roots that nothing hangs off
├─  0..13   #6 #7       explorer              5  max_paths         v4       leaf 5
╰─  0..5    #8          main                  2  other model       v4       leaf 6
"""

CALLS = """\
call  agent     role          known by  after  keeps  prompt  output  finish  weights  path, or why not  drawn  segment
#0    main      main          harness                     10       4  stop    v3       max_paths                      2
#1    main      main          harness   #0        10      10       3  stop    v3       path 1            2×           3
#2    main      main          harness   #0        10      10       3  abort   v3       path 1            2×           3
#3    main      main          harness   #0        14      19       6  stop    v3       max_paths                      2
#4    main      main-summary  harness   #3        25      27       4  stop    v4       max_paths                      2
#5    main      main          harness   #3         5       9       5  stop    v4       path 0                         4
#6    explorer  sub-agent     harness                      6       3  stop    v4       max_paths                      5
#7    explorer  sub-agent     harness   #6         9      11       2  stop    v4       max_paths                      5
#8    main      main          harness                      3       2  stop    v4       other model                    6
"""

TRANSCRIPT = """\
path 1: 13 tokens, segments 0 1 3

  context, 10 tokens
  the file test run error line in function returns value

▌ #1 main, 3 tokens sampled, v3, path 1
▌ config path parse
"""


@pytest.fixture(scope="module")
def small():
    return tree_from_bytes(file_of(small_records(), max_paths=2).to_bytes())


@pytest.fixture(scope="module")
def long():
    return tree_from_bytes(long_tree().to_bytes())


def printed(view, show=print_tree, **options):
    lines = []
    arguments = (view, options.pop("which"), Options(**options)) if show is print_path else (view, Options(**options))
    show(*arguments, lambda line: lines.append(line.plain))
    return lines


def test_a_small_tree_word_by_word(small):
    assert printed(small) == SMALL.splitlines()


def test_every_call_as_a_table(small):
    assert printed(small, calls=True) == [*SMALL.splitlines(), "", *CALLS.splitlines()]


def test_texts_begin_below_their_lines(small):
    lines = printed(small, text=True, decode=decode)
    place = lines.index("●   10..31  #0..#4 (3)  main + summary       14  max_paths         v3..v4   leaf 2")
    assert lines[place + 1:place + 6] == [
        "   #0            4 │ open read fix module", "   context       5 │ got failed passed <b> </script>",
        "   #3            6 │ search replace edit result output shell", "   context       2 │ file test",
        "   #4            4 │ run error line in"]
    assert "   #0            4 │ 10 11 12 13" in printed(small, text=True)


def test_a_path_is_a_transcript(small):
    assert printed(small, print_path, which="1", decode=decode) == TRANSCRIPT.splitlines()
    assert printed(small, print_path, which="leaf:4")[-1] == "▌ 60 61 62 63 64"
    assert printed(small, print_path, which="call:0")[-1] == "▌ 10 11 12 13"


@pytest.mark.parametrize("which", ["2", "-1", "leaf:7", "leaf:x", "call:9", "x", ""])
def test_a_path_that_is_not_there_is_refused(small, which):
    with pytest.raises(ConfigError, match=r"0 to 1.*leaf:SEGMENT \(0 to 6\)"):
        printed(small, print_path, which=which)


@pytest.mark.parametrize(("reason", "said"), [("open: its score", "open: it waits for its score"),
                                              ("open: settled", "open: it waits for others of its group")])
def test_an_open_execution_says_what_it_waits_for(small, reason, said):
    outcome = replace(small.header.outcome, reason=reason, kind="unscorable")
    assert f"outcome      {said}" in printed(replace(small, header=replace(small.header, outcome=outcome)))


def test_an_execution_that_is_not_trained_says_why():
    view = tree_from_bytes(file_of(small_records(), kind="placeholder").to_bytes())
    lines = printed(view)
    assert "outputs      30 drawn at 27 targets, none trained" in lines
    assert "not trained  27 eval" in lines
    assert any("#0..#4" in line and "eval" in line for line in lines)


@pytest.mark.parametrize(("num_calls", "seed", "rewrites"), [(312, 0, 0.04), (312, 1, 0.5), (312, 2, 0.0), (700, 3, 0.1)])
def test_hundreds_of_calls_stay_readable(num_calls, seed, rewrites):
    view = tree_from_bytes(long_tree(num_calls, seed, rewrites=rewrites).to_bytes())
    lines = printed(view)
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
    assert max(len(line) for line in printed(view, width=80)) <= 80


def test_folding_loses_no_call_and_no_sampled_token(long):
    tree = anatomy(long)
    for max_lines in (0, 200, 80, 30, 1):
        sections = outline(tree, max_lines)
        rows = [row for section in sections for row in section.rows if row.kind != "section"]
        assert sorted(n for row in rows for n in row.calls) == list(range(len(long.calls)))
        assert sum(row.num_sampled for row in rows) == int((tree.sampler >= 0).sum())
        pointed = [row.name for section in sections for row in section.rows if row.kind == "section"]
        assert sorted(pointed) == sorted(s.name for s in sections if s.branch is not None and s.branch.fork >= 0)


def test_nothing_is_folded_if_asked(long):
    kinds = {row.kind for section in outline(anatomy(long)) for row in section.rows}
    assert kinds == {"trunk", "side", "section"}


def test_the_trunk_is_the_path_that_goes_on_longest(long):
    tree = anatomy(long)
    deepest = max(tree.extent(branch)[1] for branch in tree.branches)
    assert tree.extent(tree.branches[0])[1] == deepest


def test_an_answer_without_tokens_says_what_is_missing():
    answer = tree_from_json(long_tree().to_json())
    lines = printed(answer, text=True, calls=True)
    assert any(line.startswith("left out") for line in lines)
    assert any("(ids are not here)" in line for line in lines)
    assert "Its text is not in this page." in render_page(answer)


def test_an_empty_tree_is_a_tree():
    view = tree_from_bytes(file_of([]).to_bytes())
    assert any("0 unique" in line for line in printed(view, calls=True))
    assert "The tree has no tokens." in render_page(view)


def test_a_file_of_an_older_release_is_shown(small):
    old = replace(small, header=None, calls=tuple(replace(c, agent="", known_by="") for c in small.calls))
    assert any("#1 #2" in line and "path 1" in line for line in printed(old, calls=True))


def test_parts_that_do_not_fit_are_refused(small):
    with pytest.raises(BrokenBody, match="7 parents"):
        tree_from_bytes(_packed(replace(small, bounds=small.bounds[:-1])))
    with pytest.raises(BrokenBody, match="60 ids"):
        tree_from_bytes(_packed(replace(small, ids=small.ids[:-1])))
    with pytest.raises(BrokenBody, match="parent behind"):
        tree_from_bytes(_packed(replace(small, parent=small.parent + 6)))


def _packed(view):
    return pack(view)


@pytest.mark.parametrize(("number", "name"), [(0, "A"), (25, "Z"), (26, "AA"), (27, "AB"), (702, "AAA")])
def test_sections_have_letters(number, name):
    assert letters(number) == name


# ---------------------------------------------------------------- the page


def test_the_page_holds_every_call_and_needs_nothing(long, tmp_path):
    path = tmp_path / "tree.html"
    write_html(long, path, decode)
    page = path.read_text()
    parser = parsed(page)
    assert not parser.tags & {"link", "img", "iframe", "object", "base"}
    assert not {name for name, _ in parser.attributes} & {"src", "href", "srcset", "onload", "onclick", "style"}
    rows = [value for name, value in parser.attributes if name == "id" and value and value.startswith("call-")]
    assert rows == [f"call-{n}" for n in range(312)]
    drawn = {int(value) for name, value in parser.attributes if name == "data-call" and value}
    assert drawn == set(range(312))
    told = json.loads(re.search(r'<script type="application/json" id="texts">(.*?)</script>', page, re.S)[1])
    assert len(told) == 312
    assert sum(piece[1] for piece in told[0]) == long.calls[0].length
    assert not list(tmp_path.glob(".tree*"))


def test_text_of_a_run_cannot_leave_its_place(small):
    page = render_page(small, decode)
    assert page.count("</script>") == 2
    assert "<b> \\u003c" not in page
    told = json.loads(re.search(r'id="texts">(.*?)</script>', page, re.S)[1])
    assert "got failed passed <b> </script>" in [part for call in told for piece in call for part in piece[3:]]
    odd = replace(small, header=replace(small.header, query="</title><img src=x>"))
    assert "img" not in parsed(render_page(odd, decode)).tags


def test_the_page_of_a_very_long_execution_is_bounded():
    view = tree_from_bytes(long_tree(1000, 2, scale=7).to_bytes())
    assert view.num_tokens > 700_000
    assert len(render_page(view, decode).encode()) < 8_000_000


def test_texts_are_cut_until_they_fit_and_say_how_much_is_left_out(long):
    told = json.loads(texts(anatomy(long), decode, 100_000))
    assert len(json.dumps(told).encode()) < 130_000
    assert len(told) == 312
    for pieces in told:
        for _, num, left_out, *parts in pieces:
            assert sum(len(part.split()) for part in parts) + left_out == num


def test_the_same_tree_gives_the_same_page(small):
    assert render_page(small, decode) == render_page(small, decode)

"""What the report says of role classes and of groups that could teach."""

from dataclasses import replace

from gyre.cli.ledger import RunLedger
from gyre.cli.report_trees import trees_section
from gyre.contracts import events as e


def section(synthetic, **of_outcome):
    """The section for a synthetic run, one training group of which is changed."""
    ledger, changed = RunLedger(), False
    for fact, time_s in synthetic:
        if isinstance(fact, e.GroupCompleted) and fact.purpose == "train" and not changed:
            first, *others = fact.outcomes
            fact, changed = replace(fact, outcomes=(replace(first, **of_outcome), *others), signal="zero_variance"), True
        ledger.fold(fact, time_s)
    return str(trees_section(ledger))


def test_each_role_class_has_its_row_in_the_order_of_the_classes(synthetic):
    roles = {"sub-agent": e.RoleCounts(4, 44, 1, 33), "main": e.RoleCounts(1200, 55, 1, 22)}
    page = section(synthetic, roles=roles, num_unknown_roots=3)
    assert page.index(">main<") < page.index(">sub-agent<")
    assert all(text in page for text in (">1,200<", ">44<", ">33<", "Of 3 contexts nothing is known"))
    assert "main-summary" not in page


def test_groups_that_cannot_teach_are_counted(synthetic):
    page = section(synthetic, roles={"main": e.RoleCounts(1, 1, 1, 1)})
    assert "12 groups: 11 whose rewards can be compared, 1 whose rewards are all equal." in page
    assert "Of every context it is known whose it is." in page

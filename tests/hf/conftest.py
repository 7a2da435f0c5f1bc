"""Runs Transformers' own tests, none of which may skip itself in silence; see test_transformers_common.py."""

import os
from collections import Counter

# Before transformers is imported, which reads them: slow tests run too, and nothing is asked of the Hub.
os.environ.update(RUN_SLOW="1", HF_HUB_OFFLINE="1")

import pytest  # noqa: E402
import upstream  # noqa: E402

skipped = pytest.StashKey[bool]()


def pytest_configure(config):
    for name in upstream.markers():
        config.addinivalue_line("markers", f"{name}: of Transformers' tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not hasattr(item.cls, "why_not"):
        return report
    why_not, why_failing = item.cls.why_not(item.name), item.cls.why_failing(item.name)
    if report.failed and report.when == "call" and why_failing:
        item.stash[skipped] = True
        report.outcome = "skipped"
        report.longrepr = str(item.path), None, f"Skipped: {why_failing}"
    elif report.skipped:
        item.stash[skipped] = True
        path, line, given = report.longrepr
        if reason := why_not or item.cls.missing(item.name):
            report.longrepr = path, line, f"Skipped: {reason}"
        else:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} skips itself and is not listed: {given}"
    elif report.when == "teardown" and (why_not or why_failing) and not item.stash.get(skipped, False):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} runs, but is listed: {why_not or why_failing}"
    return report


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("tests that do not apply, or lack what they need")
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number:5}  {reason}")

"""A pytest plugin that counts what tests compile and start, and fails an unmarked test that goes beyond its allowance.

An unmarked test may compile `PROGRAMS` programs of XLA and start no process. What a fixture shared by several tests
compiles counts for the suite, not for the test that happens to ask first. A marked test (`slow`, `long`, ...) may do as
it likes. Reports of git, which every run asks for its commit, and of uname, which clients ask for the machine, are not
counted as processes.
"""

import json
import os
import sys
import tomllib
from collections import Counter
from pathlib import Path

import jax.monitoring
import pytest

PROGRAMS = 5
"""Programs that an unmarked test may compile."""

ELSEWHERE = 7
"""Programs more before a test fails: those that another file has compiled if it came first. Which files a process gets
depends on which one is free, so that a test at its allowance would fail by chance."""

ALLOWED = {
    # test file or test: (programs of a test, processes of a test, why)
    "tests/components/test_chat_command.py": (8, 0, "the first chat compiles all programs of sampling"),
    "tests/components/test_distillation.py::test_teachers_that": (12, 0, "each teacher is a model of another form"),
    "tests/components/test_local_adapter.py": (8, 0, "the first job compiles all programs of a loss"),
    "tests/components/test_local_policy.py::test_snapshots_are_made": (
        10,
        0,
        "makes the policies of a run, and samples",
    ),
    "jaxft/": (100, 0, "an example is what a user types: each operation a program of its own"),
    "tests/core/test_checks.py": (8, 0, "lists become arrays outside of any jit, as users give them"),
    "tests/core/test_generate.py": (8, 0, "a call of generate is five programs, of which none is large here"),
    "tests/core/test_invariance.py": (8, 0, "an update of microbatches is six programs, beside those of whole layouts"),
    "tests/core/test_update.py": (12, 0, "the same: the programs of an update are what these tests are about"),
    "tests/benchmarks/test_aot.py::test_a_platform_is": (PROGRAMS, 1, "asks for a compiler that is not there"),
    "tests/training/test_learner.py": (9, 0, "a loss has its own update, in one piece and in parts, beside its scores"),
    "tests/rollout/test_policy.py": (22, 0, "the fingerprint of a base with adapters slices each array"),
    "tests/serving/test_run.py": (8, 0, "a session draws its own policy, and compiles how it samples"),
}
"""Tests that may do more, by the longest matching beginning of their name, with the reason."""

UNCOUNTED = ("git", "uname", "fc-list")
"""Programs of a few milliseconds by which a run asks for its commit, its platform and its fonts."""
ROOT = Path(__file__).parents[1]
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
MARKED = [marker.partition(":")[0] for marker in MARKERS]
RATCHET = ROOT / "scripts" / "ratchet.json"
COMPILED, LOADED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"

suite, shared = Counter(), Counter()
"""Programs and processes of this process of pytest, and those of them that fixtures for several tests made."""


def _count_process(event: str, arguments: tuple) -> None:
    if event == "subprocess.Popen" and Path(os.fsdecode(arguments[0])).name not in UNCOUNTED:
        suite["processes"] += 1


def pytest_configure(config: pytest.Config) -> None:
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: suite.update(programs=event == COMPILED)
    )
    # Also reported for a program that comes out of the cache.
    jax.monitoring.register_event_listener(lambda event, **_: suite.subtract(programs=event == LOADED))
    if not is_controller(config):  # whose processes are pytest-xdist's
        sys.addaudithook(_count_process)


def is_controller(config: pytest.Config) -> bool:
    """Return whether other processes of pytest run the tests of this one."""
    return config.getoption("numprocesses", None) not in (None, 0) and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    before = suite.copy()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            shared.update(suite - before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[BEFORE] = suite - shared
    return (yield)


BEFORE = pytest.StashKey[Counter]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    made = suite - shared - item.stash[BEFORE]
    programs, processes = allowance(item.nodeid)
    is_marked = any(item.get_closest_marker(name) for name in MARKED)
    if not is_marked and (made["programs"] > programs + ELSEWHERE or made["processes"] > processes):
        pytest.fail(
            f"compiled {made['programs']} programs (may: {programs}) and started {made['processes']} processes "
            f"(may: {processes}): share shapes, put the function under one jit, or mark the test (CONTRIBUTING.md)"
        )
    return result


def allowance(name: str) -> tuple[int, int]:
    """Return how many programs and processes an unmarked test may need."""
    matching = [allowed for allowed in ALLOWED if name.startswith(allowed)]
    return ALLOWED[max(matching, key=len)][:2] if matching else (PROGRAMS, 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):  # pytest-xdist sets it on its workers
        session.config.workeroutput["budget"] = dict(suite)
    elif exitstatus == 0 and exceeded(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    suite.update(getattr(node, "workeroutput", {}).get("budget", {}))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"{suite['programs']:,} programs compiled, {suite['processes']} processes started")
    for excess in exceeded(config):
        terminalreporter.write_line(f"FAILED {RATCHET.name}: {excess}")
    if not hasattr(config, "workerinput"):  # a worker's numbers are in those of the process that started it
        report_programs(suite["programs"])


def report_programs(count: int) -> None:
    """Add a number of compiled programs to the file in which `.ci/run` sums those of a part."""
    if file := os.environ.get("PROGRAMS_FILE"):
        with open(file, "a") as lines:
            lines.write(f"{count}\n")


def exceeded(config: pytest.Config) -> list[str]:
    """Return what is above `scripts/ratchet.json` after a run of all default tests, and nothing after other runs."""
    if config.args_source.name != "TESTPATHS" or "not slow" not in config.option.markexpr or config.option.keyword:
        return []
    most = json.loads(RATCHET.read_text())
    return [
        f"{count:,} {name}, where {most[name]:,} are the most" for name, count in suite.items() if count > most[name]
    ]

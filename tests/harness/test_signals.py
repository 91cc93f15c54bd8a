"""Signals in true processes: the first one closes the program, the second ends it.

One process imports what is needed, and forks one for each of these programs.
"""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

PROGRAMS = """
import asyncio, os, signal, sys, threading, time
from jaxft.harness.runtime import run_main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent that runs in the background has it ignored

def send_twice(number):
    '''Let another process send this one a signal, and once more if it lives.'''
    process = os.getpid()
    if not os.fork():
        time.sleep(0.3)  # until it is inside
        os.kill(process, number)
        time.sleep(0.3)
        if open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] != "Z":
            os.write(1, b"it lives\\n")
            os.kill(process, number)
        os._exit(0)

async def second_of_another_kind():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

async def waits_for_thread():
    os.kill(os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        thread.join()

async def holds_loop():
    send_twice(signal.SIGTERM)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)

async def closes_SIGINT(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    try:
        await asyncio.sleep(60)
    finally:
        print("closed")

async def closes_SIGTERM():
    await closes_SIGINT(signal.SIGTERM)

async def has_handler():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

async def terminates_worker():
    reader, writer = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(writer, b"x")
        time.sleep(60)
    os.read(reader, 1)
    os.kill(worker, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
    await asyncio.sleep(0.1)
    global survivor  # which lives on, and keeps nothing of the run's open
    survivor = os.fork()
    if survivor == 0:
        os.closerange(0, 3)
        time.sleep(60)

survivor, children = None, {}
for program in sys.argv[2:]:
    child = os.fork()
    if not child:
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{program}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        try:
            code = run_main(globals()[program])
        finally:
            if survivor is not None:
                os.kill(survivor, signal.SIGKILL)
        sys.stdout.flush()
        os._exit(code)
    children[child] = program
for _ in sys.argv[2:]:
    child, status = os.wait()
    print(children[child], os.waitstatus_to_exitcode(status))
"""

NAMES = (
    "second_of_another_kind", "waits_for_thread", "holds_loop", "closes_SIGINT", "closes_SIGTERM", "has_handler",
    "terminates_worker",
)  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the exit code of each program, negative for a signal, and its output."""
    folder = tmp_path_factory.mktemp("signals")
    # Python 3.12 and later warn of any fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAMS, str(folder), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {
        name: SimpleNamespace(
            code=int(codes[name]),
            out=(folder / f"{name}.out").read_text(),
            err=(folder / f"{name}.err").read_text(),
        )
        for name in NAMES
    }


def test_a_second_signal_ends_at_once(ended):
    program = ended["second_of_another_kind"]
    assert program.code == -signal.SIGTERM  # a shell says 143
    assert program.err.splitlines() == ["jaxft: SIGINT: stopping; a second signal ends at once"]


def test_a_second_signal_ends_a_loop_that_waits_for_a_thread(ended):
    assert ended["waits_for_thread"].code == -signal.SIGINT


def test_signals_are_heard_while_the_event_loop_is_held(ended):
    program = ended["holds_loop"]
    assert (program.code, program.out) == (-signal.SIGTERM, "it lives\n") and "SIGTERM: stopping" in program.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_closes_everything(ended, number, code):
    program = ended[f"closes_{number.name}"]
    assert (program.code, program.out) == (code, "closed\n")


def test_a_signal_is_heard_although_the_agent_has_handlers_of_its_own(ended):
    assert ended["has_handler"].code == 143


def test_a_forked_worker_that_is_terminated_is_no_signal_for_the_run(ended):
    program = ended["terminates_worker"]
    assert (program.code, program.out, program.err) == (0, "-15\n", "")

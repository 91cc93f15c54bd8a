"""Runs two processes on two machines, and takes the network of one away; then types the commands that both printed.

    sudo python tests/faults/unplug.py               # of Linux, with iproute2: three minutes

The machines are network namespaces, each with an address and a cable to a switch. Exit code 1 when a process ends more
than two seconds after the heartbeat, with another code than 1 or without naming the other one, or when the run does not
go on.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxft.hosts.store import HEARTBEAT_SECONDS
from tests.faults.injection import ROOT

SWITCH = "jaxft-switch"
ADDRESSES = {"jaxft0": "10.77.0.1", "jaxft1": "10.77.0.2"}
"""The machines and their addresses."""
PATIENCE = 240
"""Seconds after which a process hangs."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def build() -> None:
    """Make the two machines, and connect them."""
    ip("link", "add", SWITCH, "type", "bridge")
    ip("link", "set", SWITCH, "up")
    for machine, address in ADDRESSES.items():
        ip("netns", "add", machine)
        ip("link", "add", f"to-{machine}", "type", "veth", "peer", "name", "eth0", "netns", machine)
        ip("link", "set", f"to-{machine}", "master", SWITCH, "up")
        ip("-n", machine, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", machine, "link", "set", device, "up")
        hosts = Path("/etc/netns") / machine / "hosts"  # what a machine calls itself is its address, not 127.0.0.1
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")


def remove() -> None:
    """Remove the machines that `build` made, as far as it came, and end the processes on them."""
    for machine in ADDRESSES:
        left = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True)
        for process in map(int, left.stdout.split()):
            os.kill(process, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", machine], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", f"/etc/netns/{machine}"])
    subprocess.run(["ip", "link", "del", SWITCH], stderr=subprocess.DEVNULL)


def start(folder: Path, commands: list[list[str]]) -> "list[subprocess.Popen[str]]":
    """Start a command of jaxft on each machine."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", "jaxft.cli", *command[1:]],
            cwd=ROOT, env=environment, **pipes,
        )
        for machine, command in zip(ADDRESSES, commands, strict=True)
    ]  # fmt: skip


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output of a process; one that hangs is killed."""
    try:
        output = process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + "\nit hung"
    return process.returncode, output


def unplug(folder: Path, seconds: float) -> list[str]:
    """Take the network of the second machine away so many seconds after the first epoch; return the faults."""
    run, commands, faults = folder / "run", [], []
    settings = ("llms.policy.mesh={data: -1}", "finetuning.num_epochs=100000", f"finetuning.output_dir={run}")
    finetune = ["jaxft", "finetune", "--config-file", "tests/faults/grpo.yml"]
    finetune += [part for setting in settings for part in ("--set", setting)]
    finetune += ["--coordinator", f"{ADDRESSES['jaxft0']}:1234", "--num-processes", "2", "--process-id"]
    processes = start(folder, [[*finetune, "0"], [*finetune, "1"]])
    deadline = time.monotonic() + PATIENCE
    while not (run / "training_metrics.jsonl").exists():
        if time.monotonic() > deadline or processes[0].poll() is not None:
            for process in processes:
                process.kill()
            raise SystemExit(f"the first epoch did not come:\n{ended(processes[0])[1]}")
        time.sleep(0.1)
    time.sleep(seconds)
    ip("link", "set", "to-jaxft1", "down")
    began = time.monotonic()
    for index, process in enumerate(processes):
        code, output = ended(process)
        late = time.monotonic() - began
        print(f"process {index} ended {late:.1f} s after the cable was pulled, with {code}", flush=True)
        if code != 1 or late > HEARTBEAT_SECONDS + 2 or f"process {1 - index} of 2 has gone" not in output:
            faults.append(f"process {index}: {output[-2000:]}")
        commands.append(shlex.split(output.splitlines()[-1]))
    ip("link", "set", "to-jaxft1", "up")

    done = len((run / "training_metrics.jsonl").read_text().splitlines())
    processes = start(folder, [[*command, "--set", f"finetuning.num_epochs={done + 2}"] for command in commands])
    for index, process in enumerate(processes):
        code, output = ended(process)
        if code != 0:
            faults.append(f"process {index} did not go on: {output[-2000:]}")
    after = len((run / "training_metrics.jsonl").read_text().splitlines())
    print(f"{done} epochs, then {after} after the cable was put back", flush=True)
    return faults if after == done + 2 else [*faults, f"{after} epochs in all; wanted {done + 2}"]


def main() -> int:
    """Print what happened, and the faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=(0.4, 1.7, 3.1), help="after the first epoch")
    arguments = parser.parse_args()
    remove()
    try:
        build()
        faults = []
        for seconds in arguments.seconds:
            with tempfile.TemporaryDirectory() as folder:
                faults += unplug(Path(folder), seconds)
    finally:
        remove()
    print("\n".join(faults) or "as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

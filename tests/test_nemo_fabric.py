"""docs/nemo-fabric.md is true: its files are those of examples/fabric, and its commands train each harness."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "fabric"
PAGE = (ROOT / "docs" / "nemo-fabric.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
RUNS = [command.split()[3] for command in COMMANDS if command.startswith("jaxft finetune")]


def test_the_page_quotes_and_names_the_files_of_the_example():
    (quoted,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert textwrap.dedent(quoted) in textwrap.dedent(
        (EXAMPLE / "deep_agent.py").read_text().split("(config, builder):\n")[1]
    )
    files = {path.name for path in EXAMPLE.iterdir() if path.suffix in (".py", ".yml")}
    table = PAGE.split("| file |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+\.(?:py|yml))`", table)) == files
    assert sorted(RUNS) == sorted(name for name in files if name.endswith(".yml"))


@pytest.mark.fabric
@pytest.mark.parametrize("name", RUNS)
def test_each_harness_trains_for_an_epoch(name, tmp_path):
    """Without an activated environment; in every episode the policy is asked, and the harness ends by itself."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    (data,) = [command for command in COMMANDS if command.endswith("> train.jsonl")]
    subprocess.run(data, shell=True, check=True, cwd=tmp_path)
    (command,) = [command for command in COMMANDS if f"--config-file {name}" in command]
    program = Path(sys.executable).with_name("jaxft")
    options = ["--set", "finetuning.num_epochs=1", "--set", "finetuning.output_dir=run"]
    subprocess.run([program, *command.split()[1:], *options], check=True, cwd=tmp_path, timeout=600)
    (epoch,) = map(json.loads, (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines())
    turns = 3 if name == "mini_swe_agent.yml" else 1
    assert (epoch["episodes"], epoch["calls"], epoch["applied_updates"]) == (32, 32 * turns, 1)
    assert epoch["failed_episodes"] == (32 if name == "mini_swe_agent.yml" else 0)  # random weights hand nothing in


@pytest.mark.fabric
def test_a_module_that_cannot_be_preloaded_ends_the_run_at_once(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    )
    for modules, said in (("no_such_module", "no_such_module"), ("threads", "started threads")):
        program = f"from warm_python import warm_python\nwith warm_python(['{modules}']): pass"
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and said in done.stderr


@pytest.mark.fabric
def test_a_forked_adapter_is_a_process_like_any_other(tmp_path):
    """Its arguments, folder, environment, streams and exit code; and it ends when its client is killed."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "child.py").write_text(
        "import os, sys\n"
        "if __name__ != '__main__':\n    print('hello')\n"  # once, and no adapter may repeat it
        "def main():\n"
        "    print(sys.argv[1:], os.getcwd(), os.environ['A'], sys.stdin.readline(), os.getpid(), flush=True)\n"
        "    sys.stdin.read()\n"
        "    sys.exit(3)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, time\n"
        "from pathlib import Path\n"
        "from warm_python import warm_python\n"
        "with warm_python(['child']):\n"
        "    for end in ('communicate', 'kill'):\n"
        "        command = [os.environ['ADAPTER_PYTHON'], '-m', 'child', 'x']\n"
        "        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}\n"
        "        child = subprocess.Popen(command, **pipes, env=os.environ | {'A': 'b'}, cwd='/')\n"
        "        child.stdin.write('line\\n'), child.stdin.flush()\n"
        "        print(child.stdout.readline().strip(), number := child.stdout.readline().split()[0])\n"
        "        getattr(child, end)()\n"
        "        print(child.wait())\n"
        "        while Path('/proc', number).exists():\n"
        "            time.sleep(0.01)\n"
    )
    command = [sys.executable, "parent.py"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    first, code, second, killed = done.stdout.splitlines()
    assert first.startswith("['x'] / b line") and second.startswith("['x'] / b line") and (code, killed) == ("3", "-9")

"""The example package is installed as a user would, found by its entry point, and run; the guide quotes its lines."""

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import jaxft
from jaxft.cli import main
from jaxft.rollout.calls import Completion, Prompt

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "custom_components"
GUIDE = ROOT / "docs" / "extending.md"
SENTINEL = "sk-TEST-SENTINEL"
HAS_OPENAI = importlib.util.find_spec("openai") is not None
NOT_IN_A_COPY = ("__pycache__", "*.egg-info", "build", "runs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that the package is installed into, from a copy: building leaves files in its source."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns(*NOT_IN_A_COPY))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def package():
    """Makes the package importable here, too."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


asked_of_the_judge: list[dict] = []
judging = threading.Lock()


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-compatible server: the fourth request is refused, every third gets a reply that says no number."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judging:
            number = len(asked_of_the_judge)
            asked_of_the_judge.append({"path": self.path, "key": self.headers["Authorization"], **asked})
        if number == 3:
            status, answer = 401, {"error": {"message": f"{self.headers['Authorization']} is not known here"}}
        else:
            reply = ("0.2", "The cities differ.\nScore: 0.9", "not bad")[number % 3]
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
            status, answer = 200, {"id": "x", "object": "chat.completion", "created": 0, "model": "judge"}
            answer["choices"] = [choice]
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def judge_server():
    """The address of a server that judges, while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def runs(site, package, tmp_path_factory):
    """Return the folder of the runs, and the finished `jaxft finetune` of each configuration of the example.

    The package is found by its entry point in a process of the first, and imported here in the others.
    """
    folder = tmp_path_factory.mktemp("runs")
    command, paths = ["finetune", "--config-file", str(EXAMPLE / "config.yml")], [str(site), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JUDGE_API_KEY": SENTINEL}
    environment.pop("TRAINING_API_KEY", None)
    program = [sys.executable, "-m", "jaxft.cli"]
    done = {
        "config.yml": subprocess.run([*program, *command], cwd=folder, env=environment, capture_output=True, text=True)
    }
    # The judge under a shipped trainer, so that parts of both sides meet.
    mixed = ["judge.yml", "--set", "trainers.my_loop={_type: grpo_trainer}", "--set", "finetuning.num_epochs=1"]
    with judge_server() as url, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("JUDGE_MODEL", raising=False)
        patch.setenv("JUDGE_BASE_URL", url)
        patch.setenv("JUDGE_API_KEY", SENTINEL)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        for name, *options in [["shipped.yml"], *([mixed] if HAS_OPENAI else [])]:
            command = ["finetune", "--config-file", str(EXAMPLE / name), "--set", "imports=[jaxft_example]", *options]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(command)
            done[name] = subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())
    return folder / "runs", done


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_part_of_a_run_can_be_ones_own(runs):
    folder, done = runs[0] / "custom_components", runs[1]["config.yml"]
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"6/6 epochs +episodes 32 +failed_episodes 0 +short_episodes 0", done.stdout)
    written = {path.name for path in folder.iterdir()}
    files = {
        "config.yml",
        "environment.json",
        "result.json",
        "training_metrics.jsonl",
        "curriculum_state.json",
        "model",
    }
    assert files <= written and "tensorboard" not in written  # which the shipped trainers write

    rows = rows_of(folder / "training_metrics.jsonl")
    assert [row["epoch"] for row in rows] == list(range(6))
    assert all(row["episodes"] == 32 and 0 < row["chosen_groups"] < 8 and row["loss"] > 0 for row in rows)
    state = json.loads((folder / "curriculum_state.json").read_text())
    assert (state["current_percentile"], state["last_expansion_epoch"]) == (0.5, 5)
    worths = json.loads((folder / "model" / "table.json").read_text())
    assert worths.keys() <= {"France?", "Germany?", "Italy?", "Portugal?", "Norway?", "Greece?", "Peru?", "Japan?"}
    result = json.loads((folder / "result.json").read_text())
    assert (result["num_epochs"], result["jobs_completed"], result["model"]) == (6, 6, "model")

    resolved = yaml.safe_load((folder / "config.yml").read_text())
    assert resolved["imports"] == []  # so the entry point it was
    assert resolved["trainer_adapters"]["my_adapter"]["backend"]["api_key"] == "**********"


@pytest.mark.slow
def test_the_shipped_parts_train_the_same_agent(runs):
    folder, done = runs[0] / "shipped_components", runs[1]["shipped.yml"]
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(folder / "training_metrics.jsonl")
    assert [(row["epoch"], row["applied_updates"], row["policy_version"]) for row in rows] == [(0, 1, 1), (1, 1, 2)]
    for name in ("result.json", "timings.jsonl", "reward_plot.png", "curriculum_state.json", "model/model.safetensors"):
        assert (folder / name).is_file(), name


@pytest.mark.skipif(not HAS_OPENAI, reason="openai is not installed")
@pytest.mark.slow
def test_a_judge_scores_and_its_key_is_seen_nowhere(runs):
    folder, done = runs[0] / "judged", runs[1]["judge.yml"]
    assert (done.returncode, done.stderr) == (0, "")
    assert len(asked_of_the_judge) == 32
    for asked in asked_of_the_judge:
        assert (asked["path"], asked["key"]) == ("/v1/chat/completions", f"Bearer {SENTINEL}")
        assert (asked["model"], asked["temperature"]) == ("my-judge", 0.0)
        [message] = asked["messages"]
        assert re.match(r"Question: \w+\?\nExpected answer: \w+\nGiven answer: ", message["content"])

    (row,) = rows_of(folder / "training_metrics.jsonl")
    assert (row["episodes"], row["failed_episodes"], row["unscorable_trajectories"]) == (32, 1, 10)
    assert (row["reward_min"], row["reward_max"]) == (0.2, 0.9)
    assert "1 of 32 episodes failed" in done.stdout and "llms.judge: AuthenticationError" in done.stdout

    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SENTINEL.encode() in path.read_bytes()] == []
    assert SENTINEL not in done.stdout + done.stderr


def test_what_the_builder_keeps_of_an_episode(package):
    from jaxft_example.traj_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig

    said = [("user", "q"), ("assistant", "draft"), ("tool", "no city"), ("assistant", "draft")]
    messages = [{"role": role, "content": content} for role, content in said]

    async def agent(example):
        if example["fails"]:
            raise ValueError("no idea")
        for index, logprob in enumerate((-1.0, -2.0)):
            jaxft.episode().record(call(index, tuple(messages[: 2 * index + 1]), logprob))

    async def collect(**fields):
        builder = MyTrajectoryBuilder(MyTrajectoryBuilderConfig(num_generations=1, **fields))
        examples = [jaxft.EvalInputItem(id=f"{n}", full_dataset_entry={"fails": n == 1}) for n in range(2)]
        await builder.bind_evaluation(jaxft.Evaluation(agent, {"none": lambda item: None}, "none", 2, 0), examples)
        await builder.start_run("run")
        return await builder.finalize("run")

    def call(index, messages, logprob):
        reply = jaxft.Reply("draft", Completion([2], [logprob], [logprob], [0], "stop"), (1, index), index)
        return jaxft.Call(index, "policy", messages, Prompt("", (1, index)), reply)

    collection = asyncio.run(collect(min_episode_length=4))
    ((trajectory,),) = collection.trajectories
    assert [(item.role.value, item.content) for item in trajectory.episode] == said
    assert [item.logprobs for item in trajectory.episode] == [None, [-1.0], None, [-2.0]]
    assert not trajectory.scorable and len(trajectory.sequences) == 2
    assert collection.metrics == {
        "episodes": 2, "failed_episodes": 1, "short_episodes": 0, "unscorable_trajectories": 1,
    }  # fmt: skip
    assert collection.failures[0].startswith("training/0/1/0: ValueError: no idea\nTraceback")

    ((trajectory,),) = asyncio.run(collect(include_tool_calls=False)).trajectories
    assert [item.role.value for item in trajectory.episode] == ["user", "assistant", "assistant"]
    assert asyncio.run(collect(min_episode_length=5)).metrics["short_episodes"] == 1


def test_a_job_that_fails_is_a_status_and_not_an_exception(package):
    from jaxft_example.memory_server import MemoryServer
    from jaxft_example.trainer_adapter import MyTrainerAdapter, MyTrainerAdapterConfig

    config = MyTrainerAdapterConfig(backend={"endpoint": "memory://test", "api_key": "any"})
    user = jaxft.EpisodeItem(role="user", content="q")
    answer = jaxft.EpisodeItem(role="assistant", content="a", logprobs=[])

    def collection(run_id, *episodes):
        group = [jaxft.Trajectory(episode=episode, reward=1.0, example_id="e", generation=0) for episode in episodes]
        return jaxft.TrajectoryCollection(trajectories=[group], run_id=run_id)

    async def main():
        server = MemoryServer("any", learning_rate=1e200, batch_size=1)
        adapter = MyTrainerAdapter(config, server)
        ref = await adapter.submit(collection("first", *[[user, answer]] * 3))
        assert (await adapter.status(ref)).status is jaxft.TrainingStatusEnum.PENDING
        while (running := await adapter.status(ref)).status is not jaxft.TrainingStatusEnum.RUNNING:
            await asyncio.sleep(0)
        assert running.progress == pytest.approx(100 / 3)
        adapter.log_progress(ref, {"reward_mean": 1.0})
        failed = await adapter.wait_until_complete(ref)
        assert failed.status is jaxft.TrainingStatusEnum.FAILED and "lower the learning rate" in failed.message
        assert failed.metadata["history"] == [{"reward_mean": 1.0}]

        with pytest.raises(ValueError, match="job 'first' has been submitted before"):
            await adapter.submit(collection("first", [user, answer]))
        with pytest.raises(ValueError, match="example 'e', generation 0 has no answer"):
            await adapter.submit(collection("second", [user]))
        with pytest.raises(ValueError, match="no job 'third' was submitted; jobs: first"):
            await adapter.status(jaxft.TrainingJobRef(run_id="third", backend="memory"))
        assert await adapter.is_healthy()
        await server.close()
        assert not await adapter.is_healthy()

    asyncio.run(main())


def test_an_endpoint_that_is_not_known_is_refused(package):
    from jaxft_example.trainer_adapter import BackendConfig

    with pytest.raises(ValidationError, match="talks to no server over a network: write memory://local"):
        BackendConfig(endpoint="https://example.org", api_key="any")


def blocks(language):
    """The guide's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_guide_quotes_the_example():
    sources = [path.read_text() for pattern in ("**/*.py", "*.yml", "*.toml") for path in EXAMPLE.glob(pattern)]
    quoted = [block for language in ("python", "yaml", "toml") for block in blocks(language)]
    assert len(quoted) > 15
    for block in quoted:
        indented = [textwrap.indent(block, " " * columns) for columns in (0, 4, 8, 12)]
        is_quotation = any(block in source for block in indented for source in sources)
        assert is_quotation or block in PROGRAMS, f"neither in the example nor a program:\n{block}"


PROGRAMS = [block for block in blocks("python") if "asyncio.run(" in block]


@pytest.mark.slow
def test_the_programs_of_the_guide_run(package):
    assert PROGRAMS
    for block in PROGRAMS:
        exec(compile(block, str(GUIDE), "exec"), {"__name__": "guide"})


def test_the_guide_names_every_method_of_the_contracts():
    named = set(re.findall(r"`(\w+)(?:\([\w, ]*\))?`", GUIDE.read_text()))
    for contract in (jaxft.TrajectoryBuilder, jaxft.TrainerAdapter, jaxft.Trainer):
        assert contract.__abstractmethods__ <= named

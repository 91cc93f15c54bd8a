"""Verbs and options of the command line, in this process; what only a process of its own can show is in test_cli."""

import json

import jax
import pytest

import jaxft
from jaxft.cli import main
from jaxft.harness.registry import EvaluatorConfig, WorkflowConfig, register_evaluator, register_workflow
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.hf import save_model
from jaxft.models.load import load_model


@pytest.fixture
def run_file(toy_run, tmp_path, monkeypatch):
    """Writes the sections of a run of the toys into a file, after a change; the working directory is beside it."""
    monkeypatch.chdir(tmp_path)
    toy_run["finetuning"]["output_dir"] = "run"

    def write(change=lambda run: None, name="run.yml"):
        change(toy_run)
        (tmp_path / name).write_text(dump_yaml(toy_run))
        return name

    return write


def rows(tmp_path, name, questions):
    lines = [json.dumps({"question": q, "answer": q.upper(), "id": f"row-{q}"}) for q in questions]
    (tmp_path / name).write_text("\n".join(lines))


def test_eval_shows_what_every_evaluator_says(run_file, tmp_path, capsys):
    def one_fails(run):
        run["workflow"]["fail_on"] = ["b"]

    assert main(["eval", "--config-file", run_file(one_fails), "--num-generations", "2"]) == 0
    shown = capsys.readouterr().out
    assert "average/match   1\n" in shown and "episodes        6\n" in shown and "failed          2" in shown
    assert "2 episodes failed; the first: example '1', generation 0: ValueError: cannot answer b" in shown
    assert "pass@2          0.6667\n" in shown and "best@2          1\n" in shown
    assert not (tmp_path / "run").exists()  # nothing is written unless it is asked for

    assert main(["eval", "--config-file", "run.yml", "-o", "eval.general.output_dir", "judged"]) == 0
    result = json.loads((tmp_path / "judged" / "result.json").read_text())
    assert result.items() >= {"average/match": 1.0, "average_reward": 1.0, "episodes": 3, "failed": 1}.items()
    output = json.loads((tmp_path / "judged" / "evaluation.json").read_text())
    assert [item["id"] for item in output["eval_input"]["eval_input_items"]] == ["0", "1", "2"]
    assert main(["eval", "--config-file", "run.yml", "-o", "eval.general.output_dir", "judged"]) == 2
    assert "judged" in capsys.readouterr().err
    assert main(["eval", "--config-file", "run.yml", "--overwrite", "-o", "eval.general.output_dir", "judged"]) == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--num-generations", "0"), "wants a whole number, at least 1"),
        (("--num-generations", "two"), "wants a whole number, at least 1"),
        (("--temperature", "-1"), "wants a number that is not below 0, or 'own'"),
        (("--temperature", "warm"), "wants a number that is not below 0, or 'own'"),
    ],
)
def test_options_of_eval_say_what_they_want(run_file, capsys, option, message):
    with pytest.raises(SystemExit):
        main(["eval", "--config-file", run_file(), *option])
    assert message in capsys.readouterr().err


def test_faults_of_the_command_line_and_of_the_file_are_shown_together(run_file, capsys):
    def also_wrong(run):
        run["finetuning"]["sed"] = 1
        run["eval"]["evaluators"] |= {
            "one": {"_type": "weighted_sum", "weights": {"match": 1.0}},
            "two": {"_type": "weighted_sum", "weights": {"one": 1.0}},
        }

    options = ["--dataset", "x.txt", "--validation-dataset", "y.txt"]
    assert main(["finetune", "--config-file", run_file(also_wrong), *options]) == 2
    shown = capsys.readouterr().err
    assert "has 4 faults" in shown
    assert "eval.general.dataset: x.txt: the name of a dataset must end in one of" in shown
    assert "eval.validation.dataset: y.txt: the name of a dataset must end in one of" in shown
    assert "eval.evaluators.two.weights: 'one' is a weighted sum, too" in shown
    assert "finetuning.sed: no such field; did you mean 'seed'?" in shown


def test_a_validation_file_may_have_a_reward_of_its_own(run_file, toy_run, tmp_path, capsys):
    def of_its_own(run):
        run["eval"]["evaluators"]["strict"] = {"_type": "toy_match"}
        run["finetuning"]["reward_function"] = {"name": "strict"}

    run_file(of_its_own, "validation.yml")
    toy_run["eval"]["evaluators"].pop("strict")
    toy_run["finetuning"]["reward_function"] = {"name": "match"}
    options = ["--validation-config-file", "validation.yml", "--set", "trainers.loop._type=validating_trainer"]
    assert main(["finetune", "--config-file", run_file(), *options]) == 0
    assert "validated: 1.0 of 3, 0 failed" in capsys.readouterr().out


def test_eval_in_which_everything_fails_is_not_a_success(run_file, capsys):
    def all_fail(run):
        run["workflow"]["fail_on"] = ["a", "b", "c"]

    assert main(["eval", "--config-file", run_file(all_fail)]) == 3
    error = capsys.readouterr().err
    assert "all 3 episodes failed; the first: example '0'" in error and "in answer" in error


@pytest.mark.parametrize("text", ["-1", "inf", "hot"])
def test_eval_temperatures(run_file, capsys, text):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--config-file", run_file(), f"--temperature={text}"])
    assert caught.value.code == 2 and "--temperature" in capsys.readouterr().err
    assert main(["eval", "--config-file", "run.yml", "--temperature", "own"]) == 0


def test_a_dataset_of_the_command_line_takes_the_place_of_the_configured_one(run_file, tmp_path, capsys):
    rows(tmp_path, "a${b}.jsonl", "xyz")
    assert main(["eval", "--config-file", run_file(), "--dataset", "a${b}.jsonl"]) == 0
    assert "episodes        3" in capsys.readouterr().out
    for name, message in (("none.jsonl", "none.jsonl: cannot be read"), ("rows.txt", "eval.general.dataset: ")):
        assert main(["eval", "--config-file", "run.yml", "--dataset", name]) == 2
        assert message in capsys.readouterr().err


def test_which_fields_mean_what_stays(run_file, tmp_path, capsys):
    def with_fields(run):
        fields = {"question_key": "question", "answer_key": "wanted"}
        run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "first.jsonl", "structure": fields}

    (tmp_path / "other.csv").write_text("question,wanted\nx,X\ny,Z\n")
    assert main(["eval", "--config-file", run_file(with_fields), "--dataset", "other.csv"]) == 0
    assert "average/match   0.5" in capsys.readouterr().out


def test_the_result_may_be_a_part_of_the_output(run_file, capsys):
    assert main(["eval", "--config-file", run_file(), "--result-json-path", "$.answer"]) == 3  # the output is a text
    shown = capsys.readouterr().err
    assert "'$.answer'" in shown and "'A'" in shown
    assert main(["eval", "--config-file", "run.yml", "--result-json-path", "$"]) == 0
    assert main(["eval", "--config-file", "run.yml", "--result-json-path", "$.["]) == 2
    assert "eval.general.result_json_path: is no JSON path" in capsys.readouterr().err


def test_an_endpoint_takes_the_place_of_the_workflow(run_file, capsys):
    arguments = ["finetune", "--config-file", run_file()]
    assert main([*arguments, "--endpoint", "http://localhost:9000/episode", "--endpoint-timeout", "300"]) == 2
    assert "llms: none of them is of this process" in capsys.readouterr().err
    assert main([*arguments, "--endpoint", "localhost:9000"]) == 2
    assert "workflow.url: must begin with http:// or https://" in capsys.readouterr().err


def test_validation_from_the_command_line(run_file, tmp_path, capsys):
    rows(tmp_path, "held_out.jsonl", "xy")
    options = ["--validation-dataset", "held_out.jsonl", "--validation-interval", "2"]
    assert main(["finetune", "--config-file", run_file(), *options]) == 0
    saved = (tmp_path / "run" / "config.yml").read_text()
    assert f"file_path: {tmp_path / 'held_out.jsonl'}" in saved and "interval: 2" in saved
    assert main(["finetune", "--config-file", "run.yml", "--validation-interval", "2"]) == 2
    assert "eval.validation: needs a 'dataset', or a 'config_file' with one" in capsys.readouterr().err


def test_a_validation_file_brings_its_own_agent_and_shares_the_models(run_file, toy_run, tmp_path, capsys, toy_events):
    def strict(run):
        run["workflow"]["fail_on"] = ["c"]

    run_file(strict, "validation.yml")
    toy_run["workflow"]["fail_on"] = []
    options = ["--validation-config-file", "validation.yml", "--set", "trainers.loop._type=validating_trainer"]
    assert main(["finetune", "--config-file", run_file(), *options]) == 0
    assert "validated: 1.0 of 2, 1 failed" in capsys.readouterr().out
    assert toy_events.count("llm opened") == 1 == toy_events.count("llm closed")
    assert toy_events.count("agent opened") == 2 == toy_events.count("agent closed")

    (tmp_path / "validation.yml").write_text(
        "workflow: {_type: toy_agnet}\neval: {general: {dataset: {_type: toy_rows}}}"
    )
    assert main(["finetune", "--config-file", "run.yml", *options, "--overwrite"]) == 2
    assert "validation.yml has 1 fault:\n  workflow: no workflow is named 'toy_agnet'" in capsys.readouterr().err
    (tmp_path / "validation.yml").write_text(
        "workflow: {_type: toy_agent}\neval: {general: {dataset: {_type: toy_rows}}}"
    )
    assert main(["finetune", "--config-file", "run.yml", *options, "--overwrite"]) == 2
    assert "eval.evaluators: has no 'match', which gives the reward" in capsys.readouterr().err


def test_a_dry_run_makes_everything_and_writes_nothing(run_file, tmp_path, capsys):
    def with_memory(run):
        run["trainer_adapters"]["local"]["memory"] = {"parameters": 1.5, "update": 20.0}

    assert main(["finetune", "--config-file", run_file(with_memory), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "dataset      3 examples, the first '0'" in shown
    assert "components   ToyTrainer, ToyBuilder, ToyAdapter" in shown
    for memory in ("1.5 MiB  parameters", "20.0 MiB  update", "21.5 MiB  in all"):
        assert memory in shown
    assert "policy in training" in shown and "holds a run" not in shown
    assert shown.endswith("the configuration can be trained; nothing was written\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yml"]

    command = ["finetune", "--config-file", "run.yml", "--dry-run", "--set"]
    assert main([*command, "trainer_adapters.local.advice=take less"]) == 1
    assert "take less" in capsys.readouterr().err
    assert main([*command, "finetuning.enabled=false"]) == 2
    assert "finetuning.enabled: is false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kept", "peak"),
    [
        ([], 2, 3 * 8),  # the third is complete before the first goes
        (["finetuning.num_epochs=1"], 2, 2 * 8 + 4),  # and no third
        (["finetuning.checkpoints.max_to_keep=1"], 1, 2 * 8),
        (["finetuning.checkpoints.every=2", "finetuning.num_epochs=3"], 2, 3 * 8),
        (["finetuning.num_epochs=9", "eval.validation={dataset: {_type: toy_rows}}"], 3, 4 * 8),  # the best one, too
        (["finetuning.checkpoints.every=null"], 0, 4),
        (["trainer_adapters.local.disk.export=20000000"], 2, 2 * 8 + 20000000 / 2**20),
        (["trainer_adapters.local.disk.export=34603008"], 2, 2 * 8 + 33),  # too large also beside one checkpoint
        (["trainer_adapters.local.disk.export=34603008", "finetuning.checkpoints.every=null"], 0, 33),
    ],
)
def test_a_dry_run_shows_the_room_on_disk(run_file, capsys, monkeypatch, options, kept, peak):
    def with_disk(run):
        run["trainer_adapters"]["local"]["disk"] = {"checkpoint": 8 * 2**20, "export": 4 * 2**20}

    command = ["finetune", "--config-file", run_file(with_disk), "--dry-run"]
    command += [word for option in options for word in ("--set", option)]
    monkeypatch.setattr("jaxft.harness.commands.free_bytes", lambda path: 2 ** (20 + 5))
    code, shown = main(command), capsys.readouterr()
    assert f"8.0 MiB  a checkpoint, of which {kept} are kept" in shown.out
    assert f"{peak:.1f} MiB  in all, at the peak; 32.0 MiB are free for run" in shown.out
    assert (code == 1) == (peak > 32)
    if peak > 32:
        assert "run has 32.0 MiB free" in shown.err and "max_to_keep (now " in shown.err


def test_a_dry_run_of_adapters_shows_the_merged_model_too(run_file, tmp_path, capsys, monkeypatch):
    def with_disk(run):
        run["trainer_adapters"]["local"]["disk"] = {"checkpoint": 2**62, "export": 2**20, "merged": 2**25}
        run["trainer_adapters"]["local"] |= {"memory": {"parameters": 1.0}, "advice": "take less"}

    monkeypatch.setattr("jaxft.harness.commands.free_bytes", lambda path: 2**20)
    earlier = tmp_path / "run" / "checkpoints" / "1"
    earlier.mkdir(parents=True)
    (earlier / "arrays").write_bytes(bytes(2**19))
    assert main(["finetune", "--config-file", run_file(with_disk), "--dry-run"]) == 1
    shown = capsys.readouterr()
    assert "1.0 MiB  the exported adapters" in shown.out
    assert "32.0 MiB  the model of `jaxft export --merge`" in shown.out
    assert "finetuning.output_dir: run has 1.5 MiB free" in shown.err and "; take less" in shown.err


@pytest.mark.slow
def test_a_dry_run_shows_the_memory_of_a_policy(run_file, capsys, monkeypatch):
    def real(run):
        run["llms"]["policy"] = {"_type": "local_policy", "preset": "qwen3-50k", "slots": 4, "max_context_tokens": 32}
        run["trainer_adapters"]["local"] = {
            "_type": "local_trainer_adapter", "llm": "policy", "microbatch_tokens": 384,
        }  # fmt: skip

    monkeypatch.setattr("jaxft.training.memory.device_mebibytes", lambda sharding: 1.0)
    assert main(["finetune", "--config-file", run_file(real), "--dry-run"]) == 1
    shown = capsys.readouterr()
    for purpose in ("parameters", "optimizer", "gradients", "update", "sampling weights", "sampling", "in all"):
        assert f"MiB  {purpose}" in shown.out
    assert "this does not fit: a device has 1 MiB and" in shown.err and "microbatch_tokens (now 384)" in shown.err


def test_a_dry_run_says_when_the_directory_is_taken(run_file, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    assert main(["finetune", "--config-file", run_file(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "output_dir   run holds a run: give another output_dir, or --overwrite" in shown and "memory" not in shown


def test_export_writes_a_model_in_another_dtype(tmp_path, policy, capsys):
    model, params = policy.model, policy.weights.trained
    save_model(tmp_path / "run" / "model", model, params, tokenizer=policy.tokenizer)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert "parameters in bfloat16 written to" in capsys.readouterr().out
    _, half = load_model(tmp_path / "half", dtype=jax.numpy.bfloat16)
    assert all(leaf.dtype == jax.numpy.bfloat16 for leaf in jax.tree.leaves(half))
    assert main(["export", str(tmp_path / "run" / "model"), str(tmp_path / "half")]) == 2
    assert "is not an empty folder: choose another one" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "file")]) == 2
    assert "is not an empty folder: choose another one" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "file" / "under")]) == 2
    assert "under: the model cannot be written" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "new")]) == 2
    assert "holds no model" in capsys.readouterr().err
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"broken")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "new")]) == 2
    assert "model" in capsys.readouterr().err


def test_doctor_checks_the_machine_and_a_configuration(run_file, capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for part in ("jax ", "packages ", "llm ", "grpo_trainer", "device ", "writable ", "all checks passed"):
        assert part in shown
    assert main(["doctor", "--config-file", run_file()]) == 0
    assert "configuration  no faults" in capsys.readouterr().out

    assert main(["doctor", "--config-file", run_file(lambda run: run.pop("workflow"))]) == 2
    assert "workflow: is required, but not there" in capsys.readouterr().err


def test_doctor_names_every_extra_and_what_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    found, missing = (shown.partition(words)[2].partition("\n")[0] for words in ("extras ", "not installed "))
    assert "parquet" in found and "test" not in found + missing
    for extra in ("cuda", "envs", "openai-agents", "llama-index", "serve"):
        assert (extra in found) != (extra in missing)

    def install(name, version):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(about)

    monkeypatch.syspath_prepend(tmp_path)
    install("pyarrow", "1.2")
    assert main(["doctor"]) == 0
    assert "parquet" in capsys.readouterr().out.partition("not installed ")[2].partition("\n")[0]
    install("optax", "0.1")
    assert main(["doctor"]) == 1
    assert "optax 0.1, where jaxft needs optax<1,>=" in capsys.readouterr().err


def test_doctor_shows_how_parameters_are_cut(run_file, capsys):
    def on_a_mesh(run):
        run["llms"]["policy"] = {"_type": "local_policy", "preset": "qwen3-1m", "mesh": {"data": 16, "tensor": 2}}

    assert main(["doctor", "--sharding"]) == 0
    assert "\nembed " in capsys.readouterr().out
    command = ["doctor", "--sharding", "--config-file", run_file(on_a_mesh)]  # of more devices than are here
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "llms.policy\nmesh: data 16, fsdp 1, tensor 2" in shown and "layers/mlp/up_proj/kernel" in shown
    capsys.readouterr()
    assert main([*command, "--set", "llms.policy.dtype=bfloat16", "--set", "llms.policy.lora.rank=4"]) == 0
    narrow = capsys.readouterr().out
    of_kernel = [[x for x in out.splitlines() if "mlp/up_proj/kernel" in x][-1].split()[-1] for out in (shown, narrow)]
    assert float(of_kernel[0]) == pytest.approx(2 * float(of_kernel[1]), abs=2e-3)
    assert "adapter/layers/mlp/up_proj/lora_a" in narrow
    assert main([*command, "--set", "llms.policy.mesh.tensor=4"]) == 2
    assert "llms.policy.mesh: num_kv_heads is 2, which does not divide over the 4 devices" in capsys.readouterr().err
    assert main([*command, "--set", "llms.policy.mesh.data=-1"]) == 2
    assert "mesh is data -1 x fsdp 1 x tensor 2, which does not multiply to 1 devices" in capsys.readouterr().err


class AskedAgentConfig(WorkflowConfig, name="asked_agent"):
    pass


@register_workflow(config_type=AskedAgentConfig)
async def asked_agent(config, builder):
    """Answers what the configuration says is the question, and spoils it."""

    async def answer(example):
        asked = jaxft.episode().input_obj
        assert example["question"] == "another"
        return asked.pop().upper()

    yield answer


def test_the_question_of_the_structure_reaches_the_agent(run_file, tmp_path, capsys):
    row = {"question": "another", "asked": ["a"], "wanted": "A"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    def structured(run):
        run["workflow"] = {"_type": "asked_agent"}
        structure = {"question_key": "asked", "answer_key": "wanted"}
        run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "rows.jsonl", "structure": structure}

    assert main(["eval", "--config-file", run_file(structured), "--num-generations", "2"]) == 0
    shown = capsys.readouterr().out
    assert "average/match   1\n" in shown and "failed          0" in shown


class RemoteMatchConfig(EvaluatorConfig, name="remote_match"):
    url: str
    login: str


@register_evaluator(config_type=RemoteMatchConfig)
async def remote_match(config, builder):
    """Says aloud where it would ask."""

    async def score(item):
        if item.input_obj == "c":
            raise PermissionError(f"cannot reach {config.url} as p/SENTINEL, nor {config.login}")
        return 1.0

    yield score


@pytest.mark.parametrize("character", ["\\0", "\\ud800"])
@pytest.mark.parametrize(
    "path", ["finetuning.output_dir", "eval.general.output_dir", "eval.general.dataset.file_path", "base"]
)
def test_a_path_that_no_file_can_have_is_one_line(run_file, tmp_path, capsys, path, character):
    def rows(run):
        run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "rows.jsonl"}

    name = run_file(rows)
    options = ["--config-file", name, "--set", f'{path}="a{character}b"']
    if path == "base":
        (tmp_path / name).write_text((tmp_path / name).read_text() + f'base: "a{character}b"')
        options = options[:2]
    assert main(["finetune", *options]) == 2
    shown = capsys.readouterr().err
    assert path.rpartition(".")[2] in shown or path == "base"
    assert "path" in shown and shown.count("\n") <= 2 and "\0" not in shown


def test_secrets_of_the_configuration_are_in_no_file_and_no_message(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "sk-TEST-SENTINEL-env")

    def leaky(run):
        headers = {
            "authorization": "Bearer ${TOY_KEY}",
            "x-plain": "sk-TEST-SENTINEL-plain",
        }
        run["workflow"] = {"_type": "leaky_agent", "headers": headers}
        run["llms"]["policy"]["api_key"] = "${TOY_KEY}"
        run["eval"]["evaluators"]["remote"] = {"_type": "remote_match", "url": url, "login": "http://SENTINEL@host/"}

    url = "postgresql://me:p%2FSENTINEL@db/x?page=2&token=SENTINEL-1&sig=SENTINEL"
    options = ["--config-file", run_file(leaky), "-o", "llms.policy.api_key", "sk-TEST-SENTINEL-set"]
    monkeypatch.setattr("sys.argv", ["jaxft", "eval", *options])
    assert main(["eval", *options, "-o", "eval.general.output_dir", "judged"]) == 0
    assert main(["finetune", *options]) == 0
    assert main(["eval", *options, "-o", "eval.general.dataset.questions", "[b]"]) == 3
    wrong = ["-o", "eval.general.max_concurrency", "${TOY_KEY}", "-o", "llms.policy.api_key.deep", "${TOY_KEY}"]
    assert main(["eval", *options, *wrong]) == 2
    shown = capsys.readouterr()
    assert "PermissionError: 401 with headers" in shown.out and "PermissionError: 401 with headers" in shown.err
    files = [path for name in ("judged", "run") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(files) > 5
    for text in (shown.out, shown.err, *(path.read_bytes().decode(errors="replace") for path in files)):
        assert "SENTINEL" not in text

"""The card of a run by its records alone: what it says, and what it never says."""

import pytest
import yaml

import jaxft
from jaxft.components.run_card import run_card
from jaxft.harness.registry import register_trainer
from jaxft.models.config import LoraSpec
from jaxft.models.model_card import SavedWeights, card_text
from jaxft.redaction import hiding
from jaxft.runs.directory import RunDirectory

KEY = "sk-TEST-SENTINEL"


class PrivateTrainerConfig(jaxft.TrainerConfig, name="card_trainer"):
    note: str = ""
    gain: float = 1.0


@register_trainer(config_type=PrivateTrainerConfig)
async def card_trainer(config, builder):
    yield None


@pytest.fixture
def card(tmp_path):
    """Makes the card of a run of two epochs; `changes` maps dotted paths to values."""

    def card(version=2, **changes):
        (tmp_path / "home" / "me").mkdir(parents=True, exist_ok=True)
        mapping = {
            "llms": {"policy": {"_type": "local_policy", "path": "Qwen/Qwen3-0.6B"}},
            "workflow": {"_type": "http_agent", "url": f"http://10.0.0.7/{KEY}"},
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": str(tmp_path / "home" / "me" / "train.jsonl")}},
                "evaluators": {"won": {"_type": "llm_judge", "llm": "policy"}},
            },
            "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
            "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
            "trainers": {"loop": {"_type": "card_trainer", "note": f"see {tmp_path} {KEY}", "gain": 2.5}},
            "finetuning": {
                "enabled": True,
                "trainer": "loop",
                "trajectory_builder": "rollouts",
                "trainer_adapter": "local",
                "reward_function": {"name": "won"},
                "output_dir": str(tmp_path / "run"),
            },
        }
        for path, value in changes.items():
            *parents, last = path.split("__")
            section = mapping
            for name in parents:
                section = section[name]
            section[last] = value
        config = jaxft.config_from_mapping(mapping, base_dir=tmp_path)
        with hiding([KEY]), RunDirectory.create(tmp_path / "run", overwrite=True) as directory:
            for epoch in range(2):
                counts = {"episodes": 8, "applied_updates": 1.0, "policy_version": version - 1 + epoch}
                directory.append_jsonl(
                    "training_metrics.jsonl", {"epoch": epoch, "reward_mean": 0.5 - epoch / 4, **counts}
                )
            return run_card(config, directory, config.trainer_adapters["local"], version)

    return card


def test_a_card_names_its_base_data_and_records(card):
    made = card(eval__general__dataset={"_type": "huggingface", "path": "openai/gsm8k", "name": "main"})
    text = card_text(made, SavedWeights("bfloat16", LoraSpec(24, 8.0)))
    assert yaml.safe_load(text.split("---\n")[1]) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["jaxft", "reinforcement-learning", "grpo"],
    }
    for line in (
        "# Qwen3-0.6B trained with GRPO",
        "The licence of Qwen/Qwen3-0.6B applies to these weights, too.",
        "| training data | `huggingface` |",
        "| episodes | 16 |",
        "| updates | 2 |",
        "| training | 0.5 (epoch 1) | 0.5 (epoch 1) | 0.25 (epoch 2) |",
        "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 32 --lora-modules adapter=PATH_OF_THIS_FOLDER",
    ):
        assert line in text
    assert "unknown" not in text and "None" not in text


def test_a_card_has_no_path_no_address_and_no_secret(card, tmp_path):
    folder = tmp_path / "home" / "me" / "my_model"
    folder.mkdir(parents=True)
    (folder / "LICENSE.txt").write_text("as you like")
    text = card_text(card(llms__policy__path=str(folder)), SavedWeights("float32"))
    assert "`my_model`" in text and "`LICENSE.txt`" in text
    for private in (str(tmp_path), "home", "10.0.0.7", "SENTINEL", "note", "base_model:"):
        assert private not in text
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# My model\n")
    assert "(apache-2.0) applies to these weights" in card(llms__policy__path=str(folder)).text


def test_a_card_names_the_evaluators_of_tasks(card):
    per_task = {"sums": {}, "words": {"weight": 3, "evaluator": "spelled", "curriculum_learning": {"enabled": True}}}
    evaluators = {name: {"_type": "llm_judge", "llm": "policy"} for name in ("won", "spelled")}
    text = card(finetuning__per_task=per_task | {"| mine": {}}, eval__evaluators=evaluators).text
    assert "| reward | `won`, `spelled` |" in text and "mine" not in text


@pytest.mark.parametrize(
    ("loss", "title", "tags"),
    [("dr_grpo", "Dr. GRPO", ["reinforcement-learning", "dr_grpo"]), ("sft", "supervised finetuning", ["sft"])],
)
def test_the_method_is_that_of_the_loss(card, loss, title, tags):
    made = card(trainer_adapters__local__loss={"name": loss})
    assert f"# Qwen3-0.6B trained with {title}\n" in made.text and made.data.tags == ["jaxft", *tags]
    assert ("reinforcement learning" in made.text) == (len(tags) == 2)


def test_a_policy_that_nothing_has_trained_is_not_called_trained(card):
    made = card(version=0)
    assert made.text.startswith("\n# Qwen3-0.6B\n") and made.data.tags == ["jaxft"] and "train" not in made.text

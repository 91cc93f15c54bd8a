"""Which runs are of one group, which settings differ, and how groups are named."""

from jaxft.report.compared_runs import find_runs
from jaxft.report.run_groups import group_runs
from tests.report.compared import write_run

LOSS = "trainer_adapters.local.loss.name"
RATE = "trainer_adapters.local.optimizer.learning_rate"


def groups_of(folder):
    runs, left_out = find_runs([f"{folder}/*"])
    assert not left_out
    return group_runs(runs)


def seeds_by_name(groups):
    return {group.name: [run.seed for run in group.runs] for group in groups}


def test_runs_that_differ_in_their_seeds_are_one_group(tmp_path):
    for seed in (2, 0, 1):
        for loss in ("grpo", "dapo"):
            write_run(tmp_path / f"{loss}-{seed}", [0.5], seed=seed, settings={LOSS: loss})
    groups, differences = groups_of(tmp_path)
    assert seeds_by_name(groups) == {"loss.name=dapo": [0, 1, 2], "loss.name=grpo": [0, 1, 2]}
    assert [(each.path, each.values, each.has_effect) for each in differences] == [(LOSS, ("dapo", "grpo"), True)]


def test_a_name_has_the_fewest_settings_that_tell_all_groups_apart(tmp_path):
    for loss, beta, rate in (("grpo", 0.1, 0.01), ("dapo", 0.2, 0.01), ("dapo", 0.2, 0.1)):
        settings = {LOSS: loss, "trainer_adapters.local.loss.beta": beta, RATE: rate}
        write_run(tmp_path / f"{loss}{rate}", [0.5], settings=settings)
    groups, differences = groups_of(tmp_path)
    assert len(differences) == 3
    names = {group.name for group in groups}
    assert names == {
        "loss.name=dapo, learning_rate=0.01",
        "loss.name=dapo, learning_rate=0.1",
        "loss.name=grpo, learning_rate=0.01",
    }


def test_settings_without_effect_are_shown_and_make_no_group(tmp_path):
    write_run(tmp_path / "a", [0.5], seed=0)
    write_run(tmp_path / "b", [0.5], seed=1, settings={"trainers.loop.save_episodes": 10})
    groups, (difference,) = groups_of(tmp_path)
    assert [len(group.runs) for group in groups] == [2]
    assert (difference.values, difference.has_effect) == (("all | 10",), False)


def test_two_runs_of_one_seed_are_never_folded(tmp_path):
    for name, commit in (("old-0", "aaa"), ("old-1", "aaa"), ("new-0", "bbb"), ("new-1", "bbb")):
        write_run(tmp_path / name, [0.5], seed=int(name[-1]), about={"git_commit": commit})
    groups, _ = groups_of(tmp_path)
    assert seeds_by_name(groups) == {"git_commit=bbb": [0, 1], "git_commit=aaa": [0, 1]}
    write_run(tmp_path / "again", [0.5], seed=0, about={"git_commit": "aaa"})
    groups, _ = groups_of(tmp_path)
    assert [len(group.runs) for group in groups] == [1, 2, 1, 1]
    assert len({group.name for group in groups}) == 4


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("one", "two"):
        write_run(tmp_path / folder / "run", [0.5])
    runs, _ = find_runs([tmp_path / "two" / "run", tmp_path / "one" / "run"])
    groups, _ = group_runs(runs)
    assert len({group.name for group in groups}) == 2


def test_a_setting_that_a_version_does_not_have_is_absent(tmp_path):
    write_run(tmp_path / "a", [0.5])
    write_run(tmp_path / "b", [0.5], settings={"trainer_adapters.local.loss.delta": None})
    _, (difference,) = groups_of(tmp_path)
    assert difference.values == ("absent", "null")


def test_a_field_of_a_newer_version_at_its_default_makes_no_group(tmp_path):
    newer = {"trainer_adapters.local.loss.delta": None}
    write_run(tmp_path / "a", [0.5])
    write_run(tmp_path / "b", [0.5], seed=1, settings=newer, about={"differences": {}})
    groups, differences = groups_of(tmp_path)
    assert (len(groups), differences) == (1, ())
    said = {"trainer_adapters.local.loss.delta": {"value": None, "default": 2}}
    write_run(tmp_path / "c", [0.5], seed=2, settings=newer, about={"differences": said})
    assert len(groups_of(tmp_path)[0]) == 2


def test_a_mapping_in_the_place_of_a_value_is_a_difference(tmp_path):
    write_run(tmp_path / "a", [0.5], settings={"llms": {"lora": None}}, about={"differences": {}})
    write_run(tmp_path / "b", [0.5], settings={"llms": {"lora": {"rank": 8}}}, about={"differences": {}})
    _, differences = groups_of(tmp_path)
    assert [each.path for each in differences] == ["llms.lora", "llms.lora.rank"]


def test_paths_in_the_output_directory_follow_from_it(tmp_path):
    for seed in (0, 1):
        path = tmp_path / f"r{seed}"
        write_run(path, [0.5], seed=seed, settings={"llms": {"policy": {"path": f"{path}/model"}}})
    groups, differences = groups_of(tmp_path)
    assert (len(groups), differences) == (1, ())


def test_the_configuration_of_a_toolkit_sets_seed_and_output_directory_aside_as_the_own_one_does(tmp_path):
    for seed in (0, 1):
        judge = {"_type": "openai", "seed": 3 + seed // 2}
        toolkit = {"llms": {"policy": {"_type": "jaxft_policy", "seed": seed}, "judge": judge}}
        toolkit |= {"finetuning": {"output_dir": f"out{seed}"}, "eval": {"general": {"output_dir": f"out{seed}/eval"}}}
        write_run(tmp_path / f"r{seed}", [0.5], seed=seed, settings={"workflow": {"described": toolkit}})
    groups, differences = groups_of(tmp_path)
    assert (len(groups), differences) == (1, ())
    toolkit["llms"]["judge"]["seed"] = 9
    write_run(tmp_path / "r2", [0.5], seed=2, settings={"workflow": {"described": toolkit}})
    assert [each.path for each in groups_of(tmp_path)[1]] == ["workflow.described.llms.judge.seed"]


def test_the_order_of_paths_changes_nothing(tmp_path):
    paths = [
        write_run(tmp_path / f"{loss}{seed}", [0.5], seed=seed, settings={LOSS: loss})
        for seed in (0, 1)
        for loss in ("a", "b")
    ]
    assert group_runs(find_runs(paths)[0]) == group_runs(find_runs(reversed(paths))[0])


def test_long_values_and_paths_are_short_in_names_unless_that_makes_them_equal(tmp_path):
    for name in ("/data/one/train.jsonl", "/data/two/train.jsonl"):
        write_run(tmp_path / name[6:9], [0.5], settings={"eval.general.dataset.file_path": name})
    groups, _ = groups_of(tmp_path)
    assert [group.name for group in groups] == ["file_path=/data/one/train.jsonl", "file_path=/data/two/train.jsonl"]

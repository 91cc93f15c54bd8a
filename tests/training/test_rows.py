"""From trajectories to training rows."""

from jaxft.harness.data_models import Trajectory, TrajectoryCollection
from jaxft.training.rows import gather_rows


def test_the_order_in_which_episodes_ended_is_forgotten(make_sequence):
    def made(example_id, generation):
        fields = {"example_id": example_id, "generation": generation, "sequences": [make_sequence(generation)]}
        return Trajectory(episode=[], reward=0.0, **fields)

    groups = [[made("b", 2), made("b", 0), made("b", 1)], [made("a", 1), made("a", 0)]]
    gathered = gather_rows(TrajectoryCollection(trajectories=groups, run_id="any"), llm="policy", mask_truncated=False)
    order = [(each.example_id, each.generation) for group in gathered.groups for each in group]
    assert order == [("b", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 1)]
    assert [row.trajectory for row in gathered.rows] == [0, 1, 2, 3, 4]
    assert [row.sequence.tokens[1] for row in gathered.rows] == [10, 11, 12, 10, 11]

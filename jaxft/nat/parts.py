"""The toolkit's three parts, as jaxft registers them; each hands its work to jaxft's own part of the open run.

Their extra spellings are those of the toolkit's parts: `get_metrics` with the jobs of the run, and the metrics under
the toolkit's names in `finetuning.output_dir`.
"""

import asyncio
import json
import shlex
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nat.data_models.evaluate_runtime import EvaluationRunOutput, ProfilerResults, UsageStats
from nat.data_models.evaluator import EvalInput
from nat.data_models.finetuning import FinetuneConfig, TrainingJobRef, TrainingJobStatus, TrajectoryCollection
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem

import jaxft
from jaxft.errors import ConfigError, Stopped
from jaxft.harness import Shutdown, resume_command
from jaxft.nat.foreign import converted, from_toolkit_collection, to_toolkit_collection
from jaxft.nat.live import toolkit_episodes
from jaxft.nat.run import ToolkitRun, open_parts, open_run, open_run_or_none
from jaxft.nat.workflow import read_dataset, toolkit_item

UNINITIALIZED = "not initialized: call initialize(run_config) first"


async def _find_run(run_config: FinetuneConfig | None) -> ToolkitRun:
    """Return the open run, opened for jaxft's parts alone if the trainer is a foreign one."""
    if run_config is None:
        raise RuntimeError(UNINITIALIZED)
    return open_run_or_none() or await open_parts(run_config)


class JaxftTrajectoryBuilder(TrajectoryBuilder):
    """Runs the toolkit's workflow `num_generations` times per example; a failed episode does not end the others."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, and open the run unless jaxft's trainer has."""
        await super().initialize(run_config)
        await _find_run(run_config)

    @property
    def num_generations(self) -> int:
        """Episodes per example."""
        return self.trajectory_builder_config.num_generations

    async def own(self) -> jaxft.TrajectoryBuilder:
        """Return jaxft's builder."""
        run = await _find_run(self.run_config)
        found = await run.session.builder.get_trajectory_builder(self.run_config.trajectory_builder or "")
        if found.run_config is None:
            await found.initialize(run.session.config.finetuning)
        return found

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start the episodes of a collection."""
        await (await self.own()).start_run(run_id, meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for the episodes of a collection, and return their trajectories, one group per example."""
        return to_toolkit_collection(await (await self.own()).finalize(run_id, meta))

    async def run_eval(self) -> EvaluationRunOutput:
        """Run the workflow and the evaluators once on each example of the command line's dataset.

        On the run's own dataset the episodes are sampled as for training. On another one, as in validation, the policy
        is greedy and draws other random numbers.
        """
        own, run = await self.own(), await _find_run(self.run_config)
        options = self.run_config.run_configuration
        assert own.evaluation is not None and options is not None
        if options.dataset in (None, run.options.dataset):
            return _evaluation_output(await own.run_eval())
        if options.config_file not in (run.options.config_file, None):
            raise ConfigError(
                "--validation_config_file: a foreign trainer validates with the workflow of --config_file only"
            )
        outcomes = await own.evaluation.validate(read_dataset(run.toolkit, str(options.dataset)))
        return _evaluation_output(own.evaluation.summarize(outcomes))

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the run writes its own files."""


class JaxftTrainerAdapter(TrainerAdapter):
    """Trains the policy in this process. A trainer may give all jobs of a run one `run_id`, as the toolkit's do."""

    def __init__(self, adapter_config: Any) -> None:
        super().__init__(adapter_config)
        self._num_jobs = 0

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Store the run's configuration, and open the run unless jaxft's trainer has."""
        await super().initialize(run_config)
        await _find_run(run_config)

    async def own(self) -> jaxft.TrainerAdapter:
        """Return jaxft's adapter."""
        run = await _find_run(self.run_config)
        found = await run.session.adapter()
        if found.run_config is None:
            await found.initialize(run.session.config.finetuning)
        return found

    async def is_healthy(self) -> bool:
        """Return True if all parameters are finite and a token can be sampled."""
        return await (await self.own()).is_healthy()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Queue a job on these trajectories, and return at once."""
        job = f"{trajectories.run_id}/{self._num_jobs}"
        self._num_jobs += 1
        collection = from_toolkit_collection(trajectories).model_copy(update={"run_id": job})
        ref = await (await self.own()).submit(collection)
        toolkit_episodes.begin_collection(self._num_jobs)  # for a foreign builder under a foreign trainer
        return TrainingJobRef(run_id=trajectories.run_id, backend=ref.backend, metadata={"job": job})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job, also after it has ended."""
        return _status(ref, await (await self.own()).status(_own_ref(ref)))

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Return the last status of a job as soon as there is one."""
        return _status(ref, await (await self.own()).wait_until_complete(_own_ref(ref), poll_interval))

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the run writes its own files."""


class JaxftTrainer(Trainer):
    """Runs the whole of jaxft's training: validation, curriculum, checkpoints, plot, and the model at the end."""

    def __init__(self, trainer_config: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self._closing = AsyncExitStack()
        self._session: jaxft.Session | None = None
        self._trainer: jaxft.Trainer | None = None
        self._statuses: list[TrainingJobStatus] = []

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Open the run, and initialize both parts."""
        resume_command.set(_resume_command(run_config.trainer or ""))
        opened = open_run(
            run_config,
            trainer=self.trainer_config,
            trajectory_builder=self.trajectory_builder,
            trainer_adapter=self.trainer_adapter,
        )
        self._session = (await self._closing.enter_async_context(opened)).session
        try:
            await super().initialize(run_config)
            self._trainer = await self._session.trainer()
            await self._trainer.initialize(self._session.config.finetuning)
        except BaseException:
            await self.cleanup()
            raise

    @property
    def own(self) -> jaxft.Trainer:
        """jaxft's trainer."""
        if self._trainer is None:
            raise RuntimeError(UNINITIALIZED)
        return self._trainer

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Train for `finetuning.num_epochs`, export the model, and return the last status of each job.

        Raises:
            JaxftError: the run failed; `nat finetune` then ends with exit code 1.
            CancelledError: a signal ended the run, which was saved; the process ends with its exit code.
        """
        session, shutdown = self._session, Shutdown()
        if session is None:
            raise RuntimeError(UNINITIALIZED)
        shutdown.resume_command = resume_command.get()
        try:
            with shutdown.installed():
                statuses = await session.train_and_export()
        except Stopped as stopped:
            print(f"jaxft: {stopped}\njaxft: {shutdown.message}", file=sys.stderr)
            # Raised by the loop and not here, where asyncio would show it with its traceback: the loop cancels this
            # task, whose caller then cleans up.
            asyncio.get_running_loop().call_soon(sys.exit, shutdown.exit_code)
            await asyncio.get_running_loop().create_future()
        finally:
            write_toolkit_files(session.directory.path, session.config.finetuning.output_dir.parent)
        self._statuses = [converted(TrainingJobStatus, status) for status in statuses]
        return self._statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect trajectories and submit them as a job; None if there was nothing to submit."""
        ref = await self.own.run_epoch(epoch, run_id)
        return None if ref is None else converted(TrainingJobRef, ref)

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Return the validation's mean, minimum and maximum reward, and its number of examples."""
        return await self.own.run_validation_evaluation(epoch, run_id)

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return `{run_id, total_epochs, jobs}` with the reference and the status of each job, without its arrays."""
        jobs = [
            {
                "job_ref": TrainingJobRef(run_id=status.run_id, backend=status.backend).model_dump(),
                "status": status.model_dump(exclude={"metadata": {"token_scores"}}),
            }
            for status in self._statuses
        ]
        return {"run_id": run_id, "total_epochs": len(jobs), "jobs": jobs}

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Return the groups that the curriculum chooses for an epoch."""
        chosen = self.own.apply_curriculum_learning(from_toolkit_collection(trajectory_collection), epoch)
        return to_toolkit_collection(chosen)

    def get_curriculum_state(self) -> dict[str, Any]:
        """Return the state of the curriculum."""
        return self.own.get_curriculum_state()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Do nothing: the run writes its own files."""

    async def cleanup(self) -> None:
        """Close the run: the policy, the workflow, the logs."""
        self._session = self._trainer = None
        await self._closing.aclose()


def _own_ref(ref: TrainingJobRef) -> jaxft.TrainingJobRef:
    """Return the reference of jaxft's job, whose id is its own."""
    job = (ref.metadata or {}).get("job", ref.run_id)
    return jaxft.TrainingJobRef(run_id=job, backend=ref.backend)


def _status(ref: TrainingJobRef, status: jaxft.TrainingJobStatus) -> TrainingJobStatus:
    return converted(TrainingJobStatus, status).model_copy(update={"run_id": ref.run_id})


def _evaluation_output(output: jaxft.EvaluationRunOutput) -> EvaluationRunOutput:
    """Return the results of an evaluation in the toolkit's classes."""

    def verdicts(given: jaxft.EvalOutput) -> EvalOutput:
        # A failed episode scores 0.0, as in the toolkit, which adds the scores up.
        items = [
            EvalOutputItem(id=each.id, score=each.score or 0.0, reasoning=each.reasoning, error=each.error)
            for each in given.eval_output_items
        ]
        return EvalOutput(average_score=given.average_score, eval_output_items=items)

    return EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=output.num_failed > 0,
        eval_input=EvalInput(eval_input_items=[toolkit_item(each) for each in output.eval_input.eval_input_items]),
        evaluation_results=[(name, verdicts(each)) for name, each in output.evaluation_results],
        usage_stats=UsageStats(),
        profiler_results=ProfilerResults(),
    )


def _resume_command(trainer: str) -> str:
    """Return the command that resumes this program's run."""
    given = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    option = f"-o trainers.{trainer}.resume true"
    return given if option in given else f"{given} {option}"


NAMES = {
    "avg_reward": "reward_mean",
    "min_reward": "reward_min",
    "max_reward": "reward_max",
    "num_groups": "groups",
    "filtered_groups": "curriculum_groups",
    "filtered_avg_reward": "reward_mean_chosen",
    "curriculum_percentile": "curriculum_percentile",
}
"""The toolkit's names of metrics, and jaxft's."""


def write_toolkit_files(own: Path, folder: Path) -> None:
    """Write the files that the toolkit's own trainers leave in `finetuning.output_dir`, as far as the run has come.

    Rows have no timestamps, and hold jaxft's metrics, too.

    Args:
        own: jaxft's run directory.
        folder: `finetuning.output_dir`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = own / "training_metrics.jsonl"
    if metrics.is_file():
        rows = [_row(json.loads(line)) for line in metrics.read_text("utf-8").splitlines()]
        (folder / "training_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        names = ("epoch", "avg_reward", "min_reward", "max_reward", "num_trajectories")
        history = [{name: row[name] for name in names} for row in rows]
        (folder / "reward_history.json").write_text(json.dumps(history, indent=2), "utf-8")
    for name in ("validation_history.json", "curriculum_state.json", "reward_plot.png"):
        if (own / name).is_file():
            shutil.copyfile(own / name, folder / name)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of metrics with the toolkit's names, then jaxft's; a metric without a value is None."""
    left_out = row.get("failed_episodes", 0) - row.get("penalized_episodes", 0) + row.get("dropped_episodes", 0)
    named = {name: row.get(own) for name, own in NAMES.items()} | {
        "num_trajectories": row.get("episodes", 0) - left_out
    }
    if "curriculum_percentile" not in row:
        named |= {"filtered_groups": named["num_groups"], "filtered_avg_reward": named["avg_reward"]}
        named["curriculum_percentile"] = 1.0
    return {"epoch": row["epoch"], "run_id": f"epoch_{row['epoch']:05d}", **named, **row}

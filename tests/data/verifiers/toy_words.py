"""A taskset of one question after another: say the word. Its configuration can make it fail in several places."""

from pathlib import Path

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsData(vf.TaskData):
    word: str
    fails: bool = False


class WordsTask(vf.Task[WordsData]):
    async def setup(self, trace, runtime):
        if self.data.fails:
            try:
                raise OSError("the box is empty")
            except OSError as error:
                raise RuntimeError("no word can be had") from error

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word)

    @vf.reward
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 - len(trace.last_reply) / 10

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordsConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("cat", "dog", "cow")
    fails: str = ""


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self):
        if self.config.fails == "load":
            try:
                Path("/no/such/list/of/words").read_text()
            except OSError as error:
                raise RuntimeError("the words cannot be read") from error
        for word in self.config.words:
            data = WordsData(
                prompt=f"Say {word}", system_prompt="Be brief.", word=word, fails=self.config.fails == "setup"
            )
            yield WordsTask(data, self.config.task)

"""Agents and evaluators in processes of their own, which may hang, leak or crash without harm to the run.

`pool` belongs to the run, `zygote` forks its workers, `messages` is what they say; `jaxft.harness.worker` is what a
worker does.
"""

"""A tool and an evaluator for NeMo Agent Toolkit, and the questions that they are for."""

"""The plugin for NVIDIA's NeMo Agent Toolkit: `nat finetune` trains with jaxft. Nothing else imports it."""

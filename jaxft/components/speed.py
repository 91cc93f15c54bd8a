"""Speed of training and of sampling on accelerators, beside the ceilings of their chips; a CPU's is not measured."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from jaxft.core.sharding import compute_devices
from jaxft.models.ceilings import decode_bytes, find_chip, model_flops
from jaxft.models.config import DecoderConfig
from jaxft.models.quantized import is_quantized
from jaxft.rollout.policy import Policy


class Speed:
    """Follows the work of a policy's devices from job to job."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sampled = 0.0, 0, 0  # seconds, steps and tokens seen, up to the last job

    @cached_property
    def _itemsize(self) -> int:
        """Bytes of a number of the weights to decode with."""
        weights = self._policy.weights
        return int(weights.transfer.dtype(weights.trained).itemsize)

    def of_job(self, spans: Sequence[tuple[int, int]], begun: Mapping[str, float]) -> dict[str, float]:
        """Return tokens per second and shares of the ceilings, of the job that has ended and of the sampling before it.

        MFU counts 6 operations for each weight and token, and those of causal attention, also with frozen weights; no
        scores. The share of the bandwidth is that of the bytes that decoding reads at least, of which prompts, beside
        it, need none. A chip whose ceilings are not known, or a bridged network, has tokens per second alone.

        Args:
            spans: tokens of each sequence, and how many of them were computed with another one, once for each update.
            begun: seconds of the device thread before the job.
        """
        policy, devices = self._policy, compute_devices(self._policy.model.sharding)
        if devices[0].platform == "cpu":
            return {}
        now, counts = policy.device_seconds(), [engine.counts for engine in policy.engines]
        sampled = now["sampling"], sum(each.decode_steps for each in counts), sum(each.seen_tokens for each in counts)
        sampling, steps, seen = (new - old for new, old in zip(sampled, self._sampled, strict=True))
        self._sampled, training = sampled, now["training"] - begun["training"]
        speed = {"train_tokens_per_second": sum(tokens for tokens, _ in spans) / training}
        chip, config = find_chip(devices[0].device_kind), policy.model.config
        if chip is None or not isinstance(config, DecoderConfig):
            return speed
        flops = sum(
            number * (model_flops(config, 1, tokens) - model_flops(config, 1, shared))
            for (tokens, shared), number in Counter(spans).items()
        )
        speed["train_mfu"] = flops / training / (chip.flops_per_second * len(devices))
        if steps:
            is_narrow = policy.model.sampling_dtype is not None or is_quantized(policy.weights.trained)
            kinds = {"in_eight_bits": is_narrow, "narrow_head": policy.model.quantize_head}
            kinds["narrow_cache"] = policy.model.kv_cache_dtype is not None
            needed = decode_bytes(config, int(steps), int(seen), self._itemsize, **kinds)
            bandwidth = chip.bytes_per_second * len(policy.sampling_devices)
            speed["decode_bandwidth_share"] = needed / sampling / bandwidth
        return speed

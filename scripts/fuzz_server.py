"""Requests that schemathesis makes from the models of a server: none gets a 500, or an answer that the schema denies.

    python scripts/fuzz_server.py --requests 500

Each route gets about as many requests, half of them with something that the schema forbids, which must be refused. They
come to a server at a socket; one of eight is without the server's key, for another host or from a web page of another
site. It needs schemathesis 4, and takes about a minute for 500 requests on two CPU cores. The last line counts the
answers of each status; the exit status is 1 if any answer was wrong, and then each is shown.
"""

import argparse
import asyncio
import sys
from collections import Counter
from typing import Any

import jax
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from server_schema import openapi_schema

from jaxft.models.config import model_preset
from jaxft.models.load import init_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.policy import Policy
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.serving.app import make_app
from jaxft.serving.server import Server

ADMITTED = {"Authorization": "Bearer the-key"}
REFUSED = (
    {},
    {"x-api-key": "another-key"},
    {"Authorization": "Bearer jaxft-episode-that-is-over"},
    ADMITTED | {"Host": "evil.example"},
    ADMITTED | {"Origin": "https://evil.example"},
)
"""Headers of requests that the guard admits, and of those that it refuses."""

TIMEOUT_SECONDS = 300
"""Limit of each wait: some fields need programs of their own, which are compiled when the first request has them."""


def main() -> int:
    """Send the requests, print what is wrong, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="number of requests (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default %(default)s)")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer()
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(1))
    policy = Policy(model, params, tokenizer, stop_ids=(tokenizer.eos_token_id,), slots=8, max_context_tokens=96)
    client = ChatClient(policy)
    with recording(None):
        client.chat_sync([{"role": "user", "content": "?"}], max_tokens=2)  # compiles, for longer than a client waits
    load_all_checks()
    server = Server(make_app({"policy": client}), api_key="the-key")
    schema = schemathesis.openapi.from_dict(openapi_schema(("policy",)))
    schema.config.update(base_url=server.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    kinds = [(each, mode) for each in operations for mode in GenerationMode if mode.is_positive or list(each.body)]
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    for operation, mode in kinds:
        try:
            answers = Counter(send(operation, mode, arguments.requests // len(kinds) + 1, arguments.seed))
            print(f"{operation.label} ({mode.value}): {counted(answers)}")
            statuses += answers
        except (FailureGroup, AssertionError) as failure:
            wrong = failure.exceptions if isinstance(failure, FailureGroup) else [failure]
            faults.append(f"{operation.label} ({mode.value}):\n" + "\n".join(map(str, wrong)))
    asyncio.run(server.close())
    policy.close()
    print("\n\n".join(faults))
    print(f"{statuses.total()} requests: {counted(statuses)}")
    return 1 if faults else 0


def plausible(value: Any, name: str = "") -> Any:
    """Return the body of a request that the schema allows with what would have most of them refused replaced.

    That are integers written as 1.0, roles that the chat template does not know, and token ids beyond the vocabulary.
    """
    if isinstance(value, dict):
        return {key: plausible(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [plausible(each, name) for each in value]
    if name == "role" and value not in ("system", "user", "assistant", "tool"):
        return "user"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value % 256 if name == "prompt" and isinstance(value, int) else value


def counted(statuses: Counter[int]) -> str:
    """Return the number of answers of each status, as text."""
    return ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))


def send(operation: Any, mode: GenerationMode, num_requests: int, seed_of_requests: int) -> list[int]:
    """Send requests of one kind to one route, and return the statuses of the answers; raise if one is wrong."""
    statuses = []

    @seed(seed_of_requests)
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 7), st.sampled_from(REFUSED))
    def send_all(case: Any, draw: int, refused: dict[str, str]) -> None:
        if mode.is_positive:
            case.body = plausible(case.body)
        headers = refused if draw == 7 else ADMITTED  # generators prefer 0
        response = case.call(headers=headers, timeout=TIMEOUT_SECONDS)
        statuses.append(response.status_code)
        is_refused = response.status_code in (401, 403, 421)
        assert is_refused == (headers is not ADMITTED), f"{response.status_code} with the headers {headers}"
        # Fields may be possible one by one and not together: such requests are refused by a 400.
        excluded = [schemathesis.checks.positive_data_acceptance]
        if headers is not ADMITTED:  # by a 421, which schemathesis does not take for the refusal that it is
            excluded.append(schemathesis.checks.negative_data_rejection)
        case.validate_response(response, excluded_checks=excluded)

    send_all()
    return statuses


if __name__ == "__main__":
    sys.exit(main())

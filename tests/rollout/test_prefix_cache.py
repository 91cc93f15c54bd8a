"""Plans of the prefix cache: which tokens are reused, copied and prefilled, and which row is evicted."""

from jaxft.rollout.prefix_cache import Copy, PrefillChunk, PrefillPlan, PrefixCache

PROMPT = tuple(range(40))
LONGER, BRANCH = (*PROMPT, 7, 8, 9), (*PROMPT, 1, 2, 3, 4)


def test_a_prompt_is_prefilled_once_but_for_its_last_token():
    cache = PrefixCache(8)
    assert cache.plan(PROMPT, ()) == PrefillPlan(0, chunks=[PrefillChunk(0, 0, PROMPT[:39])])
    assert cache.plan(PROMPT, ()) == PrefillPlan(0, reused_tokens=39)
    assert cache.plan((5,), ()) == PrefillPlan(0)


def test_a_conversation_continues_in_its_row():
    cache = PrefixCache(8)
    cache.plan(PROMPT, ())
    cache.commit()
    assert cache.plan(LONGER, (39,)) == PrefillPlan(0, chunks=[PrefillChunk(0, 39, LONGER[39:42])], reused_tokens=39)


def test_a_branch_copies_the_prefix_that_it_shares():
    cache = PrefixCache(8)
    cache.plan(PROMPT, ())
    cache.commit()
    cache.plan(LONGER, (39,))
    assert cache.plan(BRANCH, (39,)) is None  # the row is not written yet
    cache.commit()
    copied = PrefillPlan(1, Copy(0, 1, 39), [PrefillChunk(1, 39, BRANCH[39:43])], reused_tokens=39)
    assert cache.plan(BRANCH, (39,)) == copied


def test_a_long_prompt_is_split_at_its_boundaries_and_into_chunks():
    plan = PrefixCache(8).plan(tuple(range(700)), (20,))
    assert [(chunk.start, len(chunk.tokens), chunk.width) for chunk in plan.chunks] == [
        (0, 20, 32),
        (20, 512, 512),
        (532, 167, 256),
    ]


def test_the_least_recently_used_row_is_evicted():
    cache = PrefixCache(2)
    prompts = [(number, *PROMPT) for number in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0]):
        cache.plan(prompt, ())
        cache.commit()
    assert cache.plan(prompts[2], ()).row == 1
    assert cache.plan(prompts[0], ()).reused_tokens == 40
    assert cache.plan(prompts[1], ()) is None  # both rows are in use until the next commit
    cache.commit()
    assert cache.plan(prompts[1], ()).reused_tokens == 0


def test_a_cleared_cache_holds_nothing():
    cache = PrefixCache(8)
    cache.plan(PROMPT, ())
    cache.clear()
    assert cache.plan(PROMPT, ()).reused_tokens == 0

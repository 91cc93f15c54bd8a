"""Tokenizers of all kinds, made here: streams, stop strings, bytes of tokens, turns, and files that cannot be used."""

import asyncio
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxft.cli import main
from jaxft.errors import RequestError
from jaxft.models.bridge import from_function
from jaxft.models.hf import save_tokenizer
from jaxft.rollout.calls import Call, Completion, Reply, openai_logprobs
from jaxft.rollout.chat import ChatTemplate, find_stop_ids
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.messages import canonical_messages
from jaxft.rollout.policy import Policy
from jaxft.rollout.streaming import StopFinder, TextDecoder
from jaxft.rollout.tokenizer import load_tokenizer
from tests.rollout.test_responses import make_template

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
CORPUS = [
    "Paris is the capital",
    "user assistant model tool",
    "yes no stop don't",
    "the quick brown fox",
    "你好世界 你好",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def finish(backend, template, special, *, bos=None, rstrip=False, more=(), **names):
    """A tokenizer with a chat template and added tokens; it adds `bos` to text, as Llama's and Gemma's do."""
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in more])
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=text, bos_token=bos, **names)
    if bos is not None:
        pair = [(bos, made.convert_tokens_to_ids(bos))]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=pair)
    return made


def byte_level(template, special, **options):
    """BPE on bytes, as GPT-2, Qwen, Llama 3 and OLMo have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return finish(backend, template, special, **options)


def sentencepiece(template, special, *, form, bos, eos, **options):
    """BPE with tokens for single bytes, as converted from SentencePiece's files."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    own = ["<unk>", bos, eos]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*own, *BYTES], show_progress=False)
    backend.train_from_iterator(CORPUS[:4] * 4, trainer)
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in own]
    backend = Tokenizer.from_str(json.dumps(saved))
    spaces, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    if form == "gemma":  # no space before a text
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        backend.decoder = decoders.Sequence([spaces, fallback, fuse])
        return finish(backend, template, special, bos=bos, eos_token=eos, unk_token="<unk>", **options)
    if form == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:  # a space after every control token
        backend = Tokenizer.from_str(json.dumps(saved | {"pre_tokenizer": None}))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([spaces, fallback, fuse, decoders.Strip(" ", 1, 0)])
    return finish(backend, template, special, bos=bos, eos_token=eos, unk_token="<unk>", **options)


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return finish(backend, "hermes", ("<|im_start|>", "<|im_end|>"), eos_token="<|im_end|>", unk_token="<unk>")


def wordpiece():
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return finish(backend, "hermes", ("<|im_start|>", "<|im_end|>"), eos_token="<|im_end|>", unk_token="[UNK]")


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|reserved|>")
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]")
# The order of the kinds is that of the families, and the end of turn is no eos_token where it is named.
KINDS = {
    "qwen": lambda: byte_level("qwen3", QWEN, eos_token="<|im_end|>", more=("<think>", "</think>")),
    "llama3": lambda: byte_level("llama3", HEADERS, bos="<|begin_of_text|>", eos_token="<|eot_id|>"),
    "olmo2": lambda: byte_level("olmo2", PHI[:1], bos="<|endoftext|>", eos_token="<|endoftext|>"),
    "gemma": lambda: sentencepiece(
        "gemma", ("<start_of_turn>", "<end_of_turn>"), form="gemma", bos="<bos>", eos="<eos>", more=("\n\n", "<table>")
    ),
    "llama2": lambda: sentencepiece("mistral", (), form="llama", bos="<s>", eos="</s>"),
    "mistral": lambda: sentencepiece("mistral", INST, form="metaspace", bos="<s>", eos="</s>"),
    "phi3": lambda: sentencepiece("phi3", PHI, form="llama", bos="<s>", eos="<|endoftext|>", rstrip=True),
    "unigram": unigram,
    "wordpiece": wordpiece,
}
ENDS = {"gemma": "<end_of_turn>", "phi3": "<|end|>"}
IN_BYTES = [name for name in KINDS if name not in ("unigram", "wordpiece")]  # can spell any text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the tokenizers, as `save_pretrained` writes them."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make in KINDS.items():
        make().save_pretrained(root / name)
    return root


DIGITS = {"Regex": r"\p{N}{1,3}|[^\s\p{N}]+|\s+"}
"""A division before bytes are merged that no class of transformers has by itself."""


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    [
        ("qwen", "GPT2Tokenizer", "llama"),
        ("qwen", "GPT2Tokenizer", "smollm3"),
        ("olmo2", "GPT2Tokenizer", None),
        ("qwen", "Qwen2Tokenizer", "qwen3"),
        ("llama3", "LlamaTokenizerFast", "llama"),
        ("llama2", "LlamaTokenizer", "llama"),
        ("gemma", "GemmaTokenizer", "gemma2"),
        ("wordpiece", "GPT2Tokenizer", "llama"),
        ("unigram", "LlamaTokenizer", None),
    ],
)
def test_tokens_are_those_of_the_file_whatever_class_is_named(kind, name, model_type, tmp_path):
    KINDS[kind]().save_pretrained(tmp_path)
    digits = {"type": "Split", "pattern": DIGITS, "behavior": "Isolated", "invert": False}
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if kind in ("qwen", "olmo2", "llama3"):
        change(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, in_bytes]})
    change(tmp_path / "tokenizer_config.json", tokenizer_class=name)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    trained, loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    for text in ("primes.\n\n1. 2023 Paris  is", "don't stop 你好<|im_end|> yes", " the fox"):
        ids = trained.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == trained.decode(ids, skip_special_tokens=False)
    own, wanted = (json.loads(each.to_str()) for each in (loaded.backend_tokenizer, trained))
    for part in ("normalizer", "pre_tokenizer", "decoder", "added_tokens"):
        assert own[part] == wanted[part]
    (tmp_path / "again").mkdir()
    save_tokenizer(tmp_path / "again", loaded)
    assert load_tokenizer(tmp_path / "again").encode("2023 Paris") == loaded.encode("2023 Paris")
    named = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert named == "PreTrainedTokenizerFast"  # which also transformers 4 knows


@pytest.fixture(scope="module")
def templates(folders):
    loaded = {name: load_tokenizer(folders / name) for name in KINDS}
    return {name: ChatTemplate(tokenizer, find_stop_ids(tokenizer)) for name, tokenizer in loaded.items()}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def template(templates, kind):
    return templates[kind]


def encode(template, text):
    return template.tokenizer.encode(text, add_special_tokens=False)


def random_ids(template, random_number):
    """Words, emoji and Chinese in tokens, or any tokens at all."""
    if random_number.random() < 0.5:
        return [random_number.randrange(template.tokenizer.vocab_size + 5) for _ in range(random_number.randrange(12))]
    pieces = random_number.choices(["你", "é", " yes", "👍", "z", "stop", "é", " "], k=4)
    return [token for piece in pieces for token in encode(template, piece)]


def test_streamed_text_is_never_taken_back(template):
    random_number = random.Random(0)
    for _ in range(150):
        ids, pieces, sent = random_ids(template, random_number), "", 0
        decoder = TextDecoder(template.answer_text, template.tokens.is_byte)
        while sent < len(ids):
            size = random_number.randrange(1, 3)
            pieces += decoder.feed(ids[sent : sent + size])
            sent += size
            assert template.answer_text(ids).startswith(pieces)


def test_streamed_text_comes_with_its_tokens(templates):
    """A character waits for its last byte, and no longer; single bytes wait for the token after them."""
    for name in IN_BYTES:
        template = templates[name]
        decoder, pieces = TextDecoder(template.answer_text, template.tokens.is_byte), []
        for token in encode(template, "yes👍 no"):
            pieces.append(decoder.feed([token]))
        assert "".join(pieces) == "yes👍 no" and any(pieces[:3])


def test_stop_strings_are_found_by_and_by(template):
    random_number = random.Random(1)
    stops = ("stop", "你好", "👍", " y")
    for _ in range(60):
        ids = [token for _ in range(4) for token in random_ids(template, random_number)]
        texts = [template.answer_text(ids[:count]) for count in range(1, len(ids) + 1)]
        expected = next((i + 1 for i, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        finder, sent, found = StopFinder(template.answer_text, stops, template.tokens.is_byte), 0, None
        while found is None and sent < len(ids):
            checked, sent = sent, min(sent + random_number.randrange(1, 6), len(ids))
            found = finder(ids[:sent], checked)
        assert found == expected


def test_bytes_of_tokens_join_to_the_text(templates):
    text = "Paris 你好 é👍🏽  x\nyes"
    for name in IN_BYTES:
        template = templates[name]
        ids = encode(template, text)
        given = openai_logprobs(ids, [-1.0] * len(ids), template.tokens.decoded_text)["content"]
        joined = bytes(byte for entry in given for byte in entry["bytes"]).decode()
        assert joined.removeprefix(" ") == text
        json.dumps(given, ensure_ascii=False).encode()  # no lone surrogates
        whole = "".join(entry["token"] for entry in given if "\N{REPLACEMENT CHARACTER}" not in entry["token"])
        assert "Paris" in whole and whole.endswith("yes")


def test_bytes_of_tokens_that_split_no_characters(templates):
    for name in ("unigram", "wordpiece"):
        template = templates[name]
        ids = encode(template, "paris yes stop")
        assert b"".join(map(template.tokens.decoded_bytes, ids)).decode().strip() == template.text(ids).strip()


def test_rows_without_a_token_have_no_text(template):
    beyond = len(template.tokenizer) + 3
    yes = encode(template, "yes")
    assert template.tokens.decoded_text(beyond) == "" and template.text([beyond]) == ""
    assert template.answer_text([*yes, beyond]) == template.responses.text([beyond, *yes]) == template.text(yes)


def test_control_tokens_are_written_once(template, kind):
    control = template.tokenizer.bos_token or template.tokenizer.eos_token
    ids = template.prompt([{"role": "user", "content": f"yes {control}"}]).ids
    if template.tokenizer.bos_token is not None and kind != "phi3":  # Phi-3's template writes none
        assert ids.count(template.tokenizer.bos_token_id) == 1 and ids[0] == template.tokenizer.bos_token_id


def test_a_text_is_continued_from_one_start_token_and_from_no_end(template):
    bos = template.tokenizer.bos_token
    start = [] if bos is None else [template.tokenizer.bos_token_id]
    assert list(template.text_ids("yes stop")) == [*start, *encode(template, "yes stop")]
    rendered = template.tokenizer.apply_chat_template([user("yes?")], tokenize=False, add_generation_prompt=True)
    if bos is not None and rendered.startswith(bos):
        assert list(template.text_ids(rendered)) == encode(template, rendered)
    assert template.text_ids(f"{bos or ''}yes").count(template.tokenizer.bos_token_id) == len(start)
    assert template.has_chat_form(rendered) and not template.has_chat_form("yes stop")


@pytest.mark.parametrize("around", ["<s> $A </s>", "$A </s>", "<s> <s> $A </s> </s>"])
def test_a_tokenizer_that_writes_an_end_behind_a_text_leaves_it_open(around):
    tokenizer = byte_level("mistral", ("<s>", "</s>"), bos=None, eos_token="</s>")
    pairs = [(each, tokenizer.convert_tokens_to_ids(each)) for each in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=pairs)
    template, start = ChatTemplate(tokenizer, ()), [pairs[0][1]] * around.count("<s>")
    assert tokenizer("yes")["input_ids"] == [*start, *encode(template, "yes"), *[pairs[1][1]] * around.count("</s>")]
    assert list(template.text_ids("yes")) == [*start, *encode(template, "yes")]
    assert list(template.text_ids("")) == start


def test_the_end_of_a_turn_ends_an_answer(template, kind):
    end = ENDS.get(kind, template.tokenizer.eos_token)
    assert template.end_of_turn == end
    expected = {template.tokenizer.eos_token_id, template.tokenizer.convert_tokens_to_ids(end)}
    assert set(template.stop_ids) == expected
    yes = encode(template, "yes")
    assert template.answer_text([*yes, max(template.stop_ids)]) == template.text(yes)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_next_turn_goes_on_from_the_sampled_ids(template, kind, is_cut):
    questions = [user("yes?"), user("no")]
    prompt = template.prompt(questions[:1])
    end = template.tokenizer.convert_tokens_to_ids(template.end_of_turn)
    ids = [*encode(template, "stop"), *([] if is_cut else [end])]
    reply = Reply(template.answer_text(ids), Completion(ids), prompt.ids, 0)
    call = Call(0, "policy", canonical_messages(questions[:1]), prompt, reply)
    history = [questions[0], assistant(call.content), questions[1]]
    continued, afresh = template.prompt(history, [call]), template.prompt(history)
    assert continued.ids[: len(call.context_ids)] == call.context_ids and not continued.is_retokenized
    behind = continued.ids[len(call.context_ids) :]
    if is_cut:
        assert behind[0] == end
    # What follows the answer is tokenised as in the whole text.
    assert afresh.ids[-len(behind) :] == behind


@pytest.mark.parametrize("name", [*KINDS, "ministral", "qwen3_5", "smollm3"])
def test_conversations_are_learned_as_transformers_writes_them(tokenizer, name):
    """Each answer is what the conversation has behind the prompt that asks for it, up to the end of the answer."""
    tokenizer = KINDS[name]() if name in KINDS else make_template(name, tokenizer).tokenizer
    template = ChatTemplate(tokenizer, find_stop_ids(tokenizer))
    messages = [user("yes?"), assistant("stop"), user("no"), assistant("paris")]
    if name == "qwen3_5":  # a prompt begins a thought, which the conversation leaves out of earlier answers
        with pytest.raises(ValueError, match="message 1, or writes it elsewhere"):
            template.conversation(messages)
    for trained in ((1, 3), (3,))[name == "qwen3_5" :]:
        ids, mask = template.conversation(messages, trained=trained)
        rendered = tokenizer.apply_chat_template(messages, return_dict=False)
        expected = [False] * len(rendered)
        for turn in trained:
            asked = template.prompt(messages[:turn]).ids
            stop = next(i for i in range(len(asked), len(rendered)) if rendered[i] in template.stop_ids) + 1
            expected[len(asked) : stop] = [True] * (stop - len(asked))
            assert tuple(ids[: len(asked)]) == asked
        assert (rendered[: len(ids)], expected[: len(ids)]) == (ids, mask) and not any(expected[len(ids) :])


@pytest.mark.parametrize("said", ["stop", " stop", "stop ", "stop " * 300])
def test_answers_with_spaces_and_long_ones_are_learned_as_prompts_have_them(template, said):
    messages = [user("yes?"), assistant(said), user("no " * 600), assistant("paris")]
    ids, _ = template.conversation(messages)
    asked = template.prompt(messages[:3]).ids
    assert template.text(ids[: len(asked)]) == template.text(asked)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "be"}, user("yes")], "System role not supported"),
        ([user("yes"), user("no")], "Roles must go user, assistant, user, ..."),
    ],
)
def test_a_template_that_refuses_is_quoted(templates, messages, words):
    with pytest.raises(RequestError) as refused:
        templates["gemma"].prompt(messages)
    assert words in str(refused.value) and "\n" not in str(refused.value)


SETTINGS = {"chat_template": "{{ messages[0].content }}", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}, "tokenizer.model": "x"}, "sentencepiece"),
        ({"tokenizer_config.json": {"tokenizer_class": "MistralCommonBackend"}, "tekken.json": {}}, "mistral-common"),
        ({"tokenizer_config.json": {}, "tokenizer.json": "{"}, "JSON"),
        ({"tokenizer_config.json": {}, "tokenizer.json": {"model": {"type": "New"}}}, ""),
        ({"tokenizer_config.json": [1]}, ""),
    ],
)
def test_files_that_cannot_be_read_cost_one_line(tmp_path, files, named):
    for name, content in files.items():
        content = SETTINGS | content if isinstance(content, dict) and name == "tokenizer_config.json" else content
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as refused:
        load_tokenizer(tmp_path)
    message = str(refused.value)
    assert str(tmp_path) in message and named in message and "\n" not in message


def test_a_malformed_template_is_refused_at_once(folders, tmp_path):
    tokenizer = load_tokenizer(folders / "qwen")
    tokenizer.chat_template = "{% if %}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="statement"):
        load_tokenizer(tmp_path)


def scripted(script, vocabulary):
    """A model that samples the tokens of the script at their positions."""

    def network(params, tokens, positions):
        following = jnp.take(params["script"], positions + 1, mode="clip")
        return 100.0 * jax.nn.one_hot(following, vocabulary)

    return from_function(network), {"script": jax.device_put(np.array(script, np.int32))}


def test_a_policy_streams_single_bytes_and_rows_without_a_token(templates):
    template = templates["gemma"]
    vocabulary, question = len(template.tokenizer) + 9, [user("yes?")]
    said = [*encode(template, "yes👍你 "), vocabulary - 1, *encode(template, "好stop no")]
    prompt = template.prompt(question).ids
    model, params = scripted([*prompt, *said, max(template.stop_ids)], vocabulary)
    sizes = {"slots": 2, "max_context_tokens": len(prompt) + len(said) + 1}
    policy = Policy(model, params, template.tokenizer, stop_ids=template.stop_ids, **sizes)
    deltas = []

    async def ask():
        async with asyncio.timeout(60):
            return await ChatClient(policy).answer(ChatRequest(question, stop="好s"), deltas.append)

    try:
        reply = asyncio.run(ask())
    finally:
        policy.close()
    assert reply.content == "".join(delta.content for delta in deltas) == "yes👍你 "
    assert reply.stop_reason == "好s" and vocabulary - 1 in reply.token_ids
    assert len([delta for delta in deltas if delta.content]) > 1 or len(deltas) == 1


def test_a_tokenizer_with_more_tokens_than_rows_is_refused_before_weights_are_read(folders, tmp_path, capsys):
    config = json.loads((TEMPLATES.parent / "hf" / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights
    tokenizer = load_tokenizer(folders / "gemma")
    tokenizer.save_pretrained(tmp_path)
    assert len(tokenizer) > config["vocab_size"]
    assert main(["chat", str(tmp_path)]) != 0
    shown = capsys.readouterr().err
    assert f"has {config['vocab_size']} rows" in shown and f"up to {len(tokenizer) - 1}" in shown
    assert "resize_token_embeddings" in shown and len(shown.strip().splitlines()) == 1

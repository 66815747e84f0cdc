"""`saguaro serve`, spoken to by the openai client: answers, streams, limits, and many at once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import scripts
import uvicorn

from saguaro_runtime import ConfigError, Engine, SamplingParams, cli
from saguaro_runtime.serve import cli as serve
from saguaro_runtime.serve.app import create_app
from saguaro_runtime.serve.guard import Limits

V = 11
LAW = scripts.random_law(V, seed=1)
NEAR = scripts.random_law(V, seed=2, near=LAW)


class Letters:
    """A letter per id; a conversation is its letters."""

    eos_token_id = None
    chat_template = "letters"

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("abcdefghijk"[id] for id in ids)

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = ["abcdefghijk".index(letter) for letter in text]
        return type("Encoding", (), {"input_ids": ids})()

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0].get("name") == "break":
            raise ValueError("no names")
        return "".join(message["content"] for message in messages)


def engine(extend_s: float = 0.0, **options: Any) -> Engine:
    models = (scripts.model(law, rows=8, extend_s=extend_s) for law in (LAW, NEAR))
    target, draft = models
    draft.extend_s = 0.0
    return scripts.engine(target, draft, tokenizer=Letters(), max_batch=8, **options)


class Served:
    """An app under uvicorn in a thread, and a client for it."""

    def __init__(self, running: Engine, limits: Limits | None = None, key: str = "none") -> None:
        self.engine = running
        app = create_app(running, "letters", limits)
        self.state = app.state.server
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        socket = config.bind_socket()
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, args=([socket],), daemon=True)
        self.thread.start()
        options: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": key, "max_retries": 0}
        self.client = openai.OpenAI(**options)
        self.options = options

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as response:
            return response.read().decode()

    def post(self, body: bytes, **headers: str) -> tuple[int, str]:
        its = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}/v1/completions", body, its)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(30)
        self.engine.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    its = Served(engine())
    yield its
    its.close()


def alone(prompt: str, **options: Any) -> str:
    with engine(method="ar") as its:
        return its.generate(prompt, SamplingParams(**options))[0].text


def test_completions_in_one_piece(served: Served) -> None:
    answer = served.client.completions.create(
        model="letters", prompt="abc", max_tokens=9, temperature=0, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == alone("abc", max_new_tokens=9) and choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 9, 12)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == list(range(9))
    for name, value, top in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs,
                                choice.logprobs.top_logprobs, strict=True):  # fmt: skip
        assert top[name] == value == max(top.values()) and len(top) == 2
    both = served.client.completions.create(
        model="letters", prompt=["abc", "de"], max_tokens=5, temperature=0, n=2
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    wanted = [alone(prompt, max_new_tokens=5) for prompt in ("abc", "de")]
    assert [choice.text for choice in both.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    ids = served.client.completions.create(model="letters", prompt=[0, 1, 2], temperature=0)
    assert ids.choices[0].text == alone("abc", max_new_tokens=16)


def test_a_stream_is_the_whole_text(served: Served) -> None:
    text = alone("abc", max_new_tokens=40)
    stop = text[11:13]
    events = list(
        served.client.completions.create(
            model="letters", prompt="abc", max_tokens=40, temperature=0, stop=[stop], stream=True,
            logprobs=0, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *pieces, last = events
    assert "".join(piece.choices[0].text for piece in pieces) == text[: text.index(stop)]
    assert len(pieces) > 3 and pieces[-1].choices[0].finish_reason == "stop"
    tokens = [name for piece in pieces for name in piece.choices[0].logprobs.tokens]
    assert "".join(tokens) == text[: text.index(stop) + 2]
    assert not last.choices and last.usage.completion_tokens == len(tokens)


def test_chat_whole_and_streamed(served: Served) -> None:
    messages: Any = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    options: dict[str, Any] = {"model": "letters", "messages": messages, "temperature": 0}
    answer = served.client.chat.completions.create(
        **options, max_completion_tokens=8, logprobs=True, top_logprobs=1
    )
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content == alone("abc", max_new_tokens=8)
    content = answer.choices[0].logprobs.content
    assert "".join(its.token for its in content) == message.content
    assert all(its.top_logprobs[0].token == its.token for its in content)
    pieces = list(served.client.chat.completions.create(**options, max_tokens=8, stream=True, n=2))
    for index in (0, 1):
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "length"
        assert "".join(its.delta.content or "" for its in mine) == message.content


def test_sampling_options_and_seeds(served: Served) -> None:
    def text(**options: Any) -> list[str]:
        answer = served.client.completions.create(
            model="letters", prompt="abc", max_tokens=12, **options
        )
        return [choice.text for choice in answer.choices]

    wanted = alone("abc", max_new_tokens=12, temperature=0.7, top_p=0.9, seed=5)
    with engine() as its:  # the same rule and drafts, alone
        params = SamplingParams(12, 0.7, top_p=0.9, seed=5)
        wanted = its.generate("abc", params)[0].text
    first, second = text(temperature=0.7, top_p=0.9, seed=5, n=2)
    assert first == wanted != second
    assert text(seed=7) == text(seed=7) and len({text()[0] for _ in range(4)}) > 1
    extra = {"top_k": 1, "min_tokens": 12, "repetition_penalty": 1.0}
    assert text(extra_body=extra) == [alone("abc", max_new_tokens=12)]
    assert set(text(temperature=0, logit_bias={"3": 100})[0]) == {"d"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99]}, "token ids"),
        ({"n": 0}, "n:"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"extra_body": {"cactus": 1}}, "cactus"),
        ({"logit_bias": {"x": 1}}, "x"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    options: dict[str, Any], words: str, served: Served
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        served.client.completions.create(**({"model": "letters", "prompt": "abc"} | options))


def refusal(its: Served, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    """The status of an error and what it says, in the protocol's form."""
    its_headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{its.url}{path}", body, its_headers, method=method)
    with pytest.raises(urllib.error.HTTPError) as found, urllib.request.urlopen(request):
        pass
    error = json.loads(found.value.read())["error"]
    assert error["code"] == found.value.code and error["type"].endswith("_error")
    return error["code"], error["message"]


def test_nonsense_is_refused_in_the_protocols_form(served: Served) -> None:
    asked: list[tuple[str, Any, str]] = [
        ("completions", its, words)
        for its, words in (
            ({"prompt": "abc\ud800"}, "prompt"),
            ({"prompt": "xyz"}, "prompt"),
            ({"prompt": "abc", "logit_bias": {"11": 1}}, "0..10"),
            ({"prompt": "abc", "logit_bias": {"9" * 5000: 1}}, "0..10"),
            ({"prompt": "abc", "logit_bias": {"1": float("nan")}}, "logit_bias of 1"),
            ({"prompt": "abc", "logit_bias": {"1": 101}}, "logit_bias of 1"),
            ({"prompt": "abc", "top_p": 2}, "top_p"),
            ({"prompt": ["abc"] * 100, "n": 3}, "300 answers"),
            ({"prompt": "abc", "max_tokens": -1}, "max_new_tokens"),
            ({"prompt": "abc", "stop": ""}, "stop"),
        )
    ]
    for content in (["a"], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "image"}]):
        asked.append(("chat/completions", {"messages": [{"role": "user", "content": content}]}, ""))
    broken = {"messages": [{"role": "user", "content": "a", "name": "break"}]}
    asked.append(("chat/completions", broken, "template refuses"))
    for route, body, words in asked:
        status, message = refusal(served, "POST", f"/v1/{route}", json.dumps(body).encode())
        assert status == 400 and words in message, body
    for raw in (b"", b"{", b"5", b"\xff", b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}"):
        assert refusal(served, "POST", "/v1/completions", raw)[0] == 400
    assert refusal(served, "GET", "/v1/completions")[0] == 405
    assert refusal(served, "POST", "/v1/models", b"{}")[0] == 405
    assert refusal(served, "GET", "/v2/cactus")[0] == 404
    assert idle(served)


def test_a_prompt_with_several_answers_counts_once(served: Served) -> None:
    options: dict[str, Any] = {"model": "letters", "prompt": ["abc", "de"], "max_tokens": 2, "n": 2}
    wanted = (5, 8, 13)
    usages = [served.client.completions.create(**options).usage]
    for piece in served.client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usages += [piece.usage] if piece.usage else []
    for its in usages:
        assert (its.prompt_tokens, its.completion_tokens, its.total_tokens) == wanted
    assert len(usages) == 2


def test_a_client_that_is_gone_before_the_stream_begins_leaves_nothing() -> None:
    with engine() as running:
        app = create_app(running, "letters")
        body = b'{"prompt": "abc", "stream": true, "n": 3}'
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> dict[str, Any]:
            return messages.pop(0) if len(messages) > 1 else messages[0]

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(30)  # nobody reads

        asyncio.run(app(scope, receive, send))
        assert app.state.server.active == 0 and running.stats()["waiting"] == 0
        assert app.state.server.limits.counts["cancelled"] == 3


def test_models_health_metrics_and_other_names(served: Served) -> None:
    assert [its.id for its in served.client.models.list()] == ["letters"]
    assert served.client.models.retrieve("letters").id == "letters"
    for call in (
        lambda: served.client.models.retrieve("cactus"),
        lambda: served.client.completions.create(model="cactus", prompt="abc"),
    ):
        with pytest.raises(openai.NotFoundError, match="cactus"):
            call()
    assert json.loads(served.get("/health")) == {"status": "ok", "speculation": "on"}
    served.client.completions.create(model="letters", prompt="abc", max_tokens=3)
    lines = served.get("/metrics").splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["saguaro_http_active"]) == 0
    assert float(values["saguaro_tokens_total"]) > 0
    assert float(values["saguaro_http_requests_total"]) > 0
    with pytest.raises(openai.BadRequestError, match="tools"):
        served.client.chat.completions.create(
            model="letters", messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )  # fmt: skip


def idle(its: Served) -> bool:
    deadline = time.monotonic() + 10
    while its.state.active or its.engine.model.held:
        if time.monotonic() > deadline:
            return False
        its.engine.step()
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("how", "temperature", "plain"),
    [
        ({"reproducible": False}, 0.0, {"method": "ar"}),
        ({"reproducible": False, "rule": "coupled"}, 0.8, {"method": "ar", "rule": "coupled"}),
        ({"reproducible": True}, None, {"method": "sd"}),
    ],
    ids=["greedy", "coupled", "reproducible"],
)
def test_fifty_at_once_have_the_texts_they_have_alone(
    how: dict[str, Any], temperature: float | None, plain: dict[str, Any]
) -> None:
    """Streams and whole answers, most of them waiting for a row; alone, and nothing overlaps.

    `reproducible`: every other text is greedy.
    """
    prompts = ["abc"[: 1 + i % 3] + "defghijk"[i % 8] for i in range(50)]

    def options(index: int) -> dict[str, Any]:
        chosen = (index % 2) * 0.8 if temperature is None else temperature
        return {"max_tokens": 6 + index % 7, "temperature": chosen, "seed": index}

    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        its = {"model": "letters", "prompt": prompts[index], **options(index)}
        if index % 3 == 0:
            stream = await client.completions.create(**its, stream=True)
            return "".join([piece.choices[0].text async for piece in stream])
        return (await client.completions.create(**its)).choices[0].text

    async def all_of_them(its: Served) -> list[str]:
        async with openai.AsyncOpenAI(**its.options, timeout=60) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(50)))

    its = Served(engine(**how))
    try:
        got = asyncio.run(all_of_them(its))
        assert idle(its)
        assert its.engine.stats()["hits"] > 0
    finally:
        its.close()
    with engine(**(how | plain)) as other:
        for index, text in enumerate(got):
            asked = options(index)
            params = SamplingParams(asked["max_tokens"], asked["temperature"], seed=index)
            assert text == other.generate(prompts[index], params)[0].text, index


def test_a_client_that_goes_away_cancels_its_requests() -> None:
    its = Served(engine(extend_s=0.02))
    try:
        stream = its.client.completions.create(
            model="letters", prompt="abc", max_tokens=400, temperature=0, stream=True, n=2
        )
        next(iter(stream))
        assert its.state.active == 2
        stream.close()
        assert idle(its)
        # One that waits for a whole answer, too.
        with pytest.raises(openai.APITimeoutError):
            its.client.with_options(timeout=0.5).completions.create(
                model="letters", prompt="abc", max_tokens=400, temperature=0
            )
        assert idle(its)
        assert its.state.limits.counts["cancelled"] == 3
        assert its.engine.stats()["tokens"] < 400
    finally:
        its.close()


def test_limits_and_the_key() -> None:
    limits = Limits(max_requests=2, max_body_bytes=400, api_key="sesame")
    its = Served(engine(extend_s=0.02), limits, key="sesame")
    try:
        asked = its.client.completions.create(
            model="letters", prompt="abc", max_tokens=300, temperature=0, stream=True, n=2
        )
        next(iter(asked))
        with pytest.raises(openai.RateLimitError, match="2"):
            its.client.completions.create(model="letters", prompt="abc")
        asked.close()
        assert idle(its)
        other = openai.OpenAI(base_url=f"{its.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            other.models.list()
        assert json.loads(its.get("/health"))["status"] == "ok"  # no secret, no key
        key = {"Authorization": "Bearer sesame"}
        long = json.dumps({"prompt": "a" * 500}).encode()
        assert its.post(long, **key)[0] == 413
        assert its.post(b"x" * 6000, **key)[0] == 413
        status, text = its.post(b"{not json", **key)
        assert status == 400 and "error" in json.loads(text)
    finally:
        its.close()


def test_an_error_of_the_model_is_an_error_of_the_call() -> None:
    its = Served(engine())
    try:
        extend = its.engine.model.extend
        its.engine.model.extend = lambda *_: 1 / 0
        with pytest.raises(openai.InternalServerError):
            its.client.completions.create(model="letters", prompt="abc")
        its.engine.model.extend = extend
        answer = its.client.completions.create(model="letters", prompt="abc", temperature=0)
        assert answer.choices[0].text == alone("abc", max_new_tokens=16)
        assert idle(its)
    finally:
        its.close()


def test_the_command_checks_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.read_key(None) is None and serve.read_key("plain") == "plain"
    (tmp_path / "key").write_text("secret\n")
    assert serve.read_key(f"@{tmp_path}/key") == "secret"
    with pytest.raises(ConfigError, match="api-key"):
        serve.read_key(f"@{tmp_path}/missing")
    with pytest.raises(ConfigError, match="api-key"):
        serve.read_key("")
    (tmp_path / "key").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="api-key"):
        serve.read_key(f"@{tmp_path}/key")
    with pytest.raises(ConfigError, match="max_requests"):
        Limits(max_requests=0)
    with serve.bind("127.0.0.1", 0) as listening:
        listening.listen()
        for port in (listening.getsockname()[1], 70000):
            with pytest.raises(ConfigError, match=f"--port {port}"):
                serve.bind("127.0.0.1", port)
    assert serve.is_loopback("127.0.0.1") and serve.is_loopback("localhost")
    assert not serve.is_loopback("0.0.0.0") and not serve.is_loopback("example.org")
    assert cli.main(["serve", "--target", str(tmp_path / "no"), "--method", "ar"]) == 1
    assert "does not exist" in capsys.readouterr().err

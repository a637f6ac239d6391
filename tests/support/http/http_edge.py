"""A small real tokenizer, a scripted generator and an app around them, for tests of the edge."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from llguidance import LLTokenizer
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.errors import InvalidRequest
from common.nodes import Role
from common.observing.clock import Clock, MonotonicClock
from common.observing.tracing import NO_TRACING, Tracing
from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, RequestCounts, SamplingParams, TokenLogprobs
from common.settings.config import ApiConfig, Config, ModelConfig
from grammars.compiler import GrammarCompiler
from grammars.gbnf import Gbnf, lark_of_gbnf
from grammars.trying.messages import Trial, Verdict
from router.access.api_key_book import ApiKeyBook
from router.access.middleware import PlainRequestMiddleware
from router.api.bodies.asked import RequestKind
from router.api.planning.body_planner import TriesGrammars
from router.api.planning.planner import Planner, RequestPlan
from router.api.planning.process import LargeBodies
from router.app import create_app
from router.cluster.admin_calls import UnknownNode
from router.cluster.drain import DrainingNode, DrainNode
from router.cluster.role import GiveRole, MovedNode
from router.core.generation import PromptResult, RequestListener, Sink, TokenChunk
from router.http.routes import Access
from router.live.feed import LiveFeed
from router.live.reading import Reading
from router.text.text_model import TextModel
from router.watch.scaling_report import ScalingAnswer
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.observing.live_readings import reading, scaling

MODEL_NAME = "tiny"
CONTEXT = 256
BOS, EOS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
TURNS_TO_THE_CLIENT = 20
"""More turns of the event loop than a token needs from the generator to the client."""
CORPUS = ["Hello world, the quick brown fox jumps over the lazy dog.", "user assistant system"] * 4


def write_model_folder(folder: Path, **generation: Any) -> Path:
    """A byte-level BPE tokenizer with chat template; `generation` is its generation_config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _nothing() -> None:
    """Say nothing: nobody listens any more."""


@dataclass
class Call:
    """One `generate` call: what it was given, how far it came, and whether it is over."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float
    priority: int = 0
    cache_salt: str = ""
    needs_salt: bool = True
    session: bytes = b""
    is_cut_to_fit: bool = False
    num_pushed: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    accept: Callable[[], None] = _nothing
    """Say that a node computes the prompt."""

    def end(self) -> None:
        """Hold nothing of the answer any more."""
        self.accept = _nothing
        self.closed.set()


Script = Callable[[Call], AsyncIterator[TokenChunk]]


class ScriptedGenerator:
    """Plays a script per call, and remembers every call."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []

    def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        sink: Sink,
        *,
        deadline_s: float,
        priority: int = 0,
        cache_salt: str = "",
        needs_salt: bool = True,
        session: bytes = b"",
        is_cut_to_fit: bool = False,
        listener: RequestListener | None = None,
    ) -> Callable[[], None]:
        call = Call(
            prompt_token_ids,
            sampling,
            deadline_s,
            priority,
            cache_salt,
            needs_salt,
            session,
            is_cut_to_fit,
        )
        call.accept = sink.on_accepted
        self.calls.append(call)
        playing = asyncio.create_task(self._play(call, sink))

        def abort() -> None:
            call.end()
            playing.cancel()

        return abort

    async def _play(self, call: Call, sink: Sink) -> None:
        try:
            async for chunk in self.script(call):
                if call.closed.is_set():
                    return
                call.num_pushed += 1
                sink.on_chunks([chunk])
                sink.send_now()
        except Exception as error:
            sink.on_failed(error)
        finally:
            call.end()


def chunks(
    token_ids: Sequence[int],
    finish: FinishReason = FinishReason.LENGTH,
    *,
    num_cached: int = 0,
    num_logprobs: int | None = None,
    size: int = 1,
) -> list[TokenChunk]:
    """`token_ids` cut into chunks of `size`; with logprobs, token t has -0.5 and t+1.. -1.5, ..."""
    made = []
    for first in range(0, len(token_ids), size):
        ids = tuple(token_ids[first : first + size])
        logprobs: tuple[TokenLogprobs, ...] = ()
        if num_logprobs is not None:
            logprobs = tuple(
                TokenLogprobs(-0.5, tuple((t + k, -0.5 - k) for k in range(num_logprobs)))
                for t in ids
            )
        is_last = first + size >= len(token_ids)
        made.append(
            TokenChunk(
                first_index=first,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=finish if is_last else None,
                counts=RequestCounts(num_cached) if num_cached and not first else None,
            )
        )
    return made


def says(
    text: str,
    finish: FinishReason = FinishReason.STOP,
    *,
    num_cached: int = 0,
    size: int = 1,
) -> Script:
    """A script that answers `text`, ended by EOS when it stops."""
    model = tiny_model()
    ids = list(model.encode(text, add_special_tokens=False, param="text"))
    if finish is FinishReason.STOP:
        ids += sorted(model.eos_token_ids)

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        of_prompt = PromptResult(prompt_logprobs=prompt_logprobs(call))
        for chunk in chunks(
            ids, finish, num_cached=num_cached, num_logprobs=call.sampling.logprobs, size=size
        ):
            yield chunk if chunk.first_index else chunk._replace(of_prompt=of_prompt)

    return play


def prompt_logprobs(call: Call) -> PromptLogprobs | None:
    """What a node finds of the prompt: token t, at place i, has -i / 8, and t, t+1, .. are best."""
    num_top, found = call.sampling.prompt_logprobs, call.prompt_token_ids[1:]
    if num_top is None or not found:
        return None
    return PromptLogprobs(
        num_top,
        tuple(-place / 8 for place in range(1, len(found) + 1)),
        tuple(1 for _ in found),
        tuple(token_id + k for token_id in found for k in range(num_top)),
        tuple(-place / 8 - k for place in range(1, len(found) + 1) for k in range(num_top)),
    )


def plays(played: Sequence[TokenChunk]) -> Script:
    """A script of these chunks."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in played:
            yield chunk

    return play


def fails(error: Exception, after: Sequence[TokenChunk] = ()) -> Script:
    """A script that raises `error` after some chunks."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in after:
            yield chunk
        raise error

    return play


def never_ends(text: str = "x") -> Script:
    """A script that gives `text` again and again, as often as `max_tokens` allows, and no end."""
    ids = tiny_model().encode(text, add_special_tokens=False, param="text")

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for first in range(0, call.sampling.max_tokens, len(ids)):
            yield TokenChunk(first_index=first, token_ids=ids)
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    return play


def hangs_after(first: Sequence[TokenChunk] = ()) -> Script:
    """A script that gives some chunks and then nothing more."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in first:
            yield chunk
        await asyncio.Event().wait()

    return play


def runs_out_of_time(time: StoppedTime, first: Sequence[TokenChunk] = ()) -> Script:
    """A script that gives some chunks; when the client has them, the request's time is over."""

    async def play(call: Call) -> AsyncIterator[TokenChunk]:
        for chunk in first:
            yield chunk
        for _ in range(TURNS_TO_THE_CLIENT):
            await asyncio.sleep(0)
        time.advance(call.deadline_s)
        await asyncio.Event().wait()

    return play


@dataclass
class FakeCluster:
    """A cluster view that says what a test wants."""

    reason: str = ""
    longest: int | None = None
    wrong: tuple[str, ...] = ()
    live: Reading | None = None

    def is_draining(self) -> bool:
        return self.reason == "draining"

    def is_ready(self) -> bool:
        return not self.reason

    def why_not_ready(self) -> str:
        return self.reason

    def warnings(self) -> list[str]:
        return list(self.wrong)

    def max_model_len(self) -> int | None:
        return self.longest

    def scrape_targets(self) -> list[dict[str, Any]]:
        return [{"targets": ["10.0.0.7:9100"], "labels": {"role": "decode", "node_id": "d"}}]

    def scaling(self) -> ScalingAnswer:
        return scaling()

    def describe(self) -> dict[str, Any]:
        return {"nodes": [], "router": "r0"}

    def read_live(self) -> Reading:
        return self.live or reading(trouble=self.reason, warnings=self.wrong)


@dataclass
class Edge:
    """An app with its parts at hand."""

    app: ASGIApp
    model: TextModel
    generator: ScriptedGenerator
    cluster: FakeCluster
    registry: CollectorRegistry
    live: LiveFeed

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 when it has none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", **options
        ) as client:
            yield client


class PlansHere:
    """`LargeBodies` without a process: plans at once, and notes how large the bodies were."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.sizes: list[int] = []

    async def plan(self, kind: RequestKind, body: bytes, max_model_len: int) -> RequestPlan:
        self.sizes.append(len(body))
        return Planner(self._model, max_model_len, lambda: 1).plan(kind, body)


class TriesHere:
    """`TriesGrammars` without a process; notes what is tried, and for whom."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.tried: list[Trial] = []
        self.clients: list[str] = []

    def begin(self, trial: Trial, client: str = "") -> Future[Verdict]:
        self.tried.append(trial)
        self.clients.append(client)
        verdict = Future[Verdict]()
        try:
            if isinstance(trial.grammar, Gbnf):
                verdict.set_result(Verdict(instead=lark_of_gbnf(trial.grammar)))
            else:
                followed = grammars_of(self._model).check(trial.grammar, trial.parts)
                verdict.set_result(Verdict(1, None if followed == trial.grammar else followed))
        except InvalidRequest as error:
            verdict.set_exception(error)
        return verdict


def grammars_of(model: TextModel) -> GrammarCompiler:
    """What compiles grammars for a model."""
    text, ends = model.tokenizer.to_str(), sorted(model.eos_token_ids)
    return GrammarCompiler(LLTokenizer(text, n_vocab=model.vocab_size, eos_token=ends))


@cache
def tiny_model() -> TextModel:
    """The model that the edge's tests share."""
    with tempfile.TemporaryDirectory() as folder:
        return TextModel.load(write_model_folder(Path(folder)), MODEL_NAME, 0)


async def moves_nothing(node_id: str, role: Role) -> MovedNode:
    raise UnknownNode(node_id, [])


async def drains_nothing(node_id: str) -> DrainingNode:
    """No node is known."""
    raise UnknownNode(node_id, [])


def make_edge(
    script: Script | None = None,
    *,
    generator: ScriptedGenerator | None = None,
    model: TextModel | None = None,
    keys: ApiKeyBook | None = None,
    clock: Clock | None = None,
    config: Config | None = None,
    drain_node: DrainNode = drains_nothing,
    give_role: GiveRole = moves_nothing,
    large_bodies: LargeBodies | None = None,
    trials: TriesGrammars | None = None,
    tracing: Tracing = NO_TRACING,
    **api: Any,
) -> Edge:
    """An edge over `model` (the tiny one); answers "Hello world" where no script is given.

    Where a deadline passes or must not pass, `clock` is the test's `StoppedTime`. Without a
    `config`, `api` are settings of the API.
    """
    clock = clock or MonotonicClock()
    model = model or tiny_model()
    if config is None:
        config = Config(role=Role.ROUTER, model=ModelConfig(model="tiny"), api=ApiConfig(**api))
    generator = generator or ScriptedGenerator(script or says("Hello world"))
    cluster, registry = FakeCluster(), CollectorRegistry()
    live = LiveFeed(cluster, clock)
    app = create_app(
        config=config,
        text_model=model,
        large_bodies=large_bodies or PlansHere(model),
        trials=trials or TriesHere(model),
        generator=generator,
        cluster=cluster,
        registry=registry,
        live=live,
        drain_node=drain_node,
        give_role=give_role,
        api_keys=keys,
        tracing=tracing,
        clock=clock,
    )
    return Edge(app, model, generator, cluster, registry, live)


def declared_routes(edge: Edge) -> list[tuple[Route, Access]]:
    """Every route of the application, with who may call it."""
    app = edge.app
    while not isinstance(app, PlainRequestMiddleware):
        app = app.app  # type: ignore[attr-defined]
    found = []
    for route, declared in app.routes.routes:
        assert isinstance(route, Route)
        found.append((route, declared.access))
    return found


def events(body: bytes) -> list[Any]:
    """The payloads of an SSE body, `[DONE]` as text; every event is checked for its frame."""
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    payloads: list[Any] = []
    for part in parts:
        assert part.startswith(b"data: ")
        text = part.removeprefix(b"data: ").decode()
        payloads.append(text if text == "[DONE]" else json.loads(text))
    return payloads

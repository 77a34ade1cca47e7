"""``kvsieve chat``: a conversation in the terminal."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

from kvsieve.cli.generate import sampling_params, summary
from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import DrawingOptions, ModelOptions, SamplingOptions, option
from kvsieve.cli.profiles import profiled
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.errors import KvsieveError

if TYPE_CHECKING:
    from kvsieve.attention.config import SparseAttention
    from kvsieve.engine.llm import LLM
    from kvsieve.engine.outputs import Completion
    from kvsieve.engine.requests import Event, GenerationService
    from kvsieve.engine.sampling import SamplingParams

_HELP = """\
/stats   what the last answer read and cost
/clear   forget the conversation
/exit    leave (so does Ctrl-D)
A backslash at the end of a line continues it on the next. Ctrl-C stops an answer."""

_CACHE_BYTES = 1 << 30
"""Of earlier turns: an answer then only has to read what is new."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How the conversation begins."""

    system: Annotated[
        str | None,
        option(
            "-sys",
            "--system",
            panel="Conversation",
            metavar="TEXT",
            show_default="the model's own",
            help="What the model is told before the first message.",
        ),
    ] = None


@grouped
def chat(
    *,
    options: ChatOptions,
    sampling: DrawingOptions,
    sparse: SparseOptions,
    model: ModelOptions,
) -> None:
    """Talk with a model in the terminal.

    Answers come as they are made. /stats says what the last one read and cost,
    /clear forgets the conversation, /exit leaves; Ctrl-C stops an answer.

    \b
    Examples:
      kvsieve chat
      kvsieve chat -m model.gguf --sparse-attn --temp 0
      kvsieve chat --system "Answer in one sentence."
    """
    from kvsieve.engine.service import Service

    params = sampling_params(SamplingOptions(**vars(sampling)))
    with StatusBar() as bar, open_model(model, bar=bar, sparse=sparse.setting) as llm:
        bar.close()
        setting = profiled(sparse.setting, options=sparse, llm=llm, model=model)
        service = Service(llm, max_sequences=1, cache_ram_bytes=_CACHE_BYTES)
        try:
            talk = Conversation(llm, service, params=params, sparse=setting, bar=bar)
            talk.run(system=options.system)
        finally:
            service.close()


class Conversation:
    """Reads lines and answers them. Answers go to stdout, everything else to stderr."""

    def __init__(
        self,
        llm: "LLM",
        service: "GenerationService",
        *,
        params: "SamplingParams",
        sparse: "SparseAttention | None",
        bar: StatusBar,
    ) -> None:
        self._llm = llm
        self._service = service
        self._params = params
        self._sparse = sparse
        self._bar = bar
        self._opening: list[dict[str, str]] = []
        self._messages: list[dict[str, str]] = []
        self._last: Completion | None = None

    def run(self, *, system: str | None) -> None:
        """Until /exit or the end of the input."""
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._bar.close()
        _edit_lines()
        note = f"{self._llm.config.name}: /help says what can be done here"
        while True:
            try:
                if note:
                    _note(note)
                line = _next_line()
                if line is None or line.strip() == "/exit":
                    return
                note = self._obey(line)
            except KeyboardInterrupt:
                note = "\n/exit or Ctrl-D leaves"

    def _obey(self, line: str) -> str:
        """Answer a line, or do what its command says; returns what there is to say about it."""
        word = line.strip()
        if word == "/clear":
            self._messages = list(self._opening)
            return "the conversation is forgotten"
        if word == "/stats":
            return self._stats()
        if word == "/help" or (word.startswith("/") and " " not in word):
            return _HELP
        return self._answer(line) if word else ""

    def _answer(self, text: str) -> str:
        self._messages.append({"role": "user", "content": text})
        try:
            completion = self._generate(self._llm.chat_prompt(self._messages))
        except KvsieveError as error:
            # The message is taken back, so that the next one finds a conversation that works.
            self._messages.pop()
            return f"{error} (/clear begins anew)"
        self._last = completion
        self._messages.append({"role": "assistant", "content": completion.text})
        if completion.finish_reason == "cancelled":
            return "stopped"
        return "ended by the limit of tokens" if completion.finish_reason == "length" else ""

    def _generate(self, prompt_ids: list[int]) -> "Completion":
        from kvsieve.engine.requests import GenerationRequest

        events: SimpleQueue[Event] = SimpleQueue()
        request = GenerationRequest(
            prompt_ids=tuple(prompt_ids), params=self._params, sparse=self._sparse
        )
        ticket = self._service.submit(request, events.put)
        self._bar.begin("reading the prompt")
        try:
            while True:
                try:
                    completion = self._show(events.get())
                except KeyboardInterrupt:
                    # The engine answers with a last event, whatever it was doing.
                    ticket.cancel()
                    continue
                if completion is not None:
                    return completion
        finally:
            self._bar.close()
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _show(self, event: "Event") -> "Completion | None":
        from kvsieve.engine.requests import Failed, Finished, PromptLogprobs, PromptProgress

        if isinstance(event, PromptProgress):
            self._bar.advance(event.processed, event.total)
            return None
        self._bar.close()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, PromptLogprobs):  # which nobody here asks for
            return None
        sys.stdout.write(event.text)
        sys.stdout.flush()
        return event.completion if isinstance(event, Finished) else None

    def _stats(self) -> str:
        if self._last is None:
            return "nothing was answered yet"
        done = self._last
        used = done.prompt_tokens + done.completion_tokens
        return (
            f"{summary(done, sampled=self._params.temperature > 0)}\n"
            f"{done.timings.cache_n:,} of {done.prompt_tokens:,} prompt tokens were cached; "
            f"{used:,} of {self._llm.ctx_size:,} tokens of context are used"
        )


def _next_line() -> str | None:
    """What the user says; None at the end of the input."""
    parts: list[str] = []
    while True:
        try:
            parts.append(input(("… " if parts else "> ") if sys.stdin.isatty() else ""))
        except EOFError:
            return None
        if not parts[-1].endswith("\\"):
            return "\n".join(parts)
        parts[-1] = parts[-1][:-1]


def _edit_lines() -> None:
    """Arrow keys and history at a terminal, where Python was built with them."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            # Importing it changes what input() does.
            import readline  # noqa: F401


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

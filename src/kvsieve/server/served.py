"""The model that a server speaks for, and what its chat template can do."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.engine.chat_template import Renderer
from kvsieve.engine.llm import LLM
from kvsieve.engine.no_vocabulary import AnyTokenizer
from kvsieve.engine.requests import GenerationService
from kvsieve.engine.template_worker import TemplateWorker
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import TemplateError
from kvsieve.models.config import ModelConfig

_PROBE = "kvsieve_probe"


@dataclass(frozen=True, kw_only=True)
class TemplateAbilities:
    """What a chat template makes of tools.

    tools       it tells the model about them
    tool_calls  it shows calls of earlier turns
    tagged      calls are written between ``<tool_call>`` and ``</tool_call>``
    """

    tools: bool = False
    tool_calls: bool = False
    tagged: bool = False

    def to_json(self) -> dict[str, bool]:
        """llama.cpp's `chat_template_caps`."""
        return {"supports_tools": self.tools, "supports_tool_calls": self.tool_calls}


@dataclass(frozen=True, kw_only=True)
class Served:
    """Everything the endpoints need to know of the engine.

    template_source  text of the chat template, or None
    template         renders it, or None
    name             what replies call the model
    file_name        of the model, without its folder
    """

    service: GenerationService
    tokenizer: AnyTokenizer
    model: ModelConfig
    ctx_size: int
    fingerprint: str
    isa: str
    threads: int
    name: str
    file_name: str
    file_bytes: int
    cache_types: tuple[str, str]
    num_params: int = 0
    template_source: str | None = None
    template: TemplateWorker | None = None
    abilities: TemplateAbilities = field(default_factory=TemplateAbilities)
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """End the process that renders the template."""
        if self.template is not None:
            self.template.close()


def served_model(
    llm: LLM,
    service: GenerationService,
    *,
    template_source: str | None = None,
    name: str | None = None,
) -> Served:
    """What there is to know of a loaded model.

    `name`: what replies call it; None: as its file or folder is called.
    `template_source` replaces the chat template of its file. Either is rendered in a process of its
    own, which `Served.close` ends; TemplateError if it does not compile.
    """
    file, tokenizer = llm.file, llm.tokenizer
    source = template_source or llm.chat_template
    template = None
    if isinstance(source, str) and isinstance(tokenizer, Tokenizer):
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        template = TemplateWorker(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
        )
    return Served(
        service=service,
        tokenizer=tokenizer,
        model=llm.config,
        ctx_size=llm.ctx_size,
        fingerprint=llm.info.fingerprint,
        isa=llm.info.isa,
        threads=llm.info.threads,
        name=name or file.path.resolve().name.removesuffix(".gguf"),
        file_name=file.path.name,
        file_bytes=file.file_bytes,
        num_params=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        cache_types=llm.cache_types,
        template_source=source if template else None,
        template=template,
        abilities=template_abilities(template) if template else TemplateAbilities(),
    )


def template_abilities(template: TemplateWorker) -> TemplateAbilities:
    """Try the template with a tool and with a call, and look whether they show."""
    user = {"role": "user", "content": "Hi"}
    tool = {"type": "function", "function": {"name": _PROBE, "parameters": {"type": "object"}}}
    call = {"id": "0", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return TemplateAbilities(
        tools=_shows(template, [user], tools=[tool]),
        tool_calls=_shows(template, [user, said, user], tools=None),
        tagged="<tool_call>" in template.source,
    )


def _shows(
    template: Renderer,
    messages: list[dict[str, Any]],
    *,
    tools: list[Mapping[str, Any]] | None,
) -> bool:
    try:
        return _PROBE in template.render(messages, tools=tools)
    except TemplateError:
        return False

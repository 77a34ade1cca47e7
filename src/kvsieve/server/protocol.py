"""The bodies of requests. Types are strict: "5" and 2.5 are no integers, null is "not given".

Fields that change nothing about a reply (`user`, `metadata` and the like) are accepted and left
aside, as are fields that nobody knows. Fields that would change it and are not supported are
refused in `server.unsupported`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class SparseFields(Wire):
    """How this request's attention differs from the server's setting."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    enabled: bool | None = None
    k: int | None = None
    mass: float | None = None
    selector: str | None = None
    share: str | None = None


class StreamOptions(Wire):
    """What a stream holds besides the text."""

    include_usage: bool | None = None


class Common(Wire):
    """What all generating endpoints take: OpenAI's fields, and llama.cpp's beside them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | list[list[Any]] | None = None
    n: int | None = None
    # llama.cpp's
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_discard: int | None = Field(None, ge=0)
    n_keep: int | None = Field(None, ge=-1)
    return_progress: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: float | None = Field(None, ge=1, le=3600)
    json_schema: dict[str, Any] | bool | None = None
    # refused where they ask for something: see `server.unsupported`
    grammar: str | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    dynatemp_range: float | None = None
    xtc_probability: float | None = None
    dry_multiplier: float | None = None
    samplers: list[Any] | str | None = None
    t_max_predict_ms: float | None = None
    lora: list[Any] | None = None
    # ours
    sparse: SparseFields | None = None


class FunctionCall(Wire):
    """A function that the model called: `arguments` is JSON in a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Wire):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionSpec(Wire):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool: only functions."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Wire):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(Wire):
    """A `tool_choice` that demands one function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFields(Wire):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """What the text of a reply has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFields | None = None
    # llama.cpp's place for the schema of a json_object
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ChatRequest(Common):
    """`POST /chat/completions`."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TemplateRequest(Wire):
    """`POST /apply-template`, and `/chat/completions/input_tokens`."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


Prompt = str | list[str] | list[int] | list[list[int]]
MixedPrompt = str | list[Any]
"""llama.cpp's: text, ids, text and ids mixed, or a list of those."""


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: Prompt | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    echo: bool | None = None
    logprobs: int | bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class NativeRequest(Common):
    """`POST /completion`, llama.cpp's own."""

    prompt: MixedPrompt
    n_predict: int | None = None
    max_tokens: int | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None


class TokenizeRequest(Wire):
    """`POST /tokenize`."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Wire):
    """`POST /detokenize`."""

    tokens: list[int]


class SlotFileRequest(Wire):
    """`POST /slots/{id}?action=save|restore`."""

    filename: str | None = None

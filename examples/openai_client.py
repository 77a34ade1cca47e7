"""The official OpenAI client on a kvsieve server: ``python openai_client.py [URL]``."""

import json
import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id

print("-- a conversation")
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    temperature=0,
    max_tokens=40,
)
print(reply.choices[0].message.content)
print("tokens:", reply.usage.prompt_tokens, "+", reply.usage.completion_tokens)

print("-- a stream, with sparse attention for this request alone")
story = "The ship left at dawn and nobody on the pier waved. " * 200
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": story + "In one sentence: what happened at dawn?"}],
    temperature=0,
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
    # Fields that OpenAI does not have go here.
    # As many blocks as hold 90 % of the attention, by the estimate of selector `anchors`.
    extra_body={"sparse": {"mass": 0.9}},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.choices and chunk.choices[0].finish_reason:
        attention = chunk.model_extra["attention"]
        timings = chunk.model_extra["timings"]
print()
kept = attention["kept_mass"]
print("attention:", attention["mode"], attention["density"])
print("kept mass:", "everything" if kept is None else f"about {kept['mean']:.3f}")
print(f"prompt: {timings['prompt_per_second']:.0f} tokens/s, {timings['cache_n']} from the cache")

print("-- how probable a text is")
for ending in (" Paris", " a banana"):
    scored = client.completions.create(
        model=model,
        prompt="The capital of France is" + ending,
        max_tokens=0,
        echo=True,
        logprobs=0,
    )
    logprobs = scored.choices[0].logprobs
    start = len("The capital of France is")
    places = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
    print(f"{ending!r}: {sum(value for place, value in places if place >= start):.2f}")

print("-- JSON that fits a schema")
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe a cat as JSON with a name and an age."}],
    temperature=0,
    max_tokens=60,
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "cat",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "age": {"type": "integer", "minimum": 0, "maximum": 30},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        },
    },
)
print(json.loads(reply.choices[0].message.content))

"""LangChain on a kvsieve server: ``python langchain_chat.py [URL]``."""

import os
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
model = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model="smollm2",
    temperature=0,
    max_tokens=40,
    stream_usage=True,
)

prompt = ChatPromptTemplate.from_messages(
    [("system", "You answer in one sentence."), ("user", "What is {thing}?")]
)
chain = prompt | model

reply = chain.invoke({"thing": "a harbour"})
print(reply.content)
print(reply.usage_metadata)

for piece in chain.stream({"thing": "a lighthouse"}):
    print(piece.content, end="", flush=True)
print()

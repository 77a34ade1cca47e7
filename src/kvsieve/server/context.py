"""What endpoints find of their server: they are functions of modules, and it is in the app."""

from dataclasses import dataclass

from fastapi import Request

from kvsieve.server.config import ServerConfig
from kvsieve.server.prompts import PromptReader
from kvsieve.server.served import Served


@dataclass(frozen=True, kw_only=True)
class Context:
    """One server: its model, its settings, and how it reads prompts."""

    served: Served
    config: ServerConfig
    reader: PromptReader


def context_of(request: Request) -> Context:
    """The server that a request came to."""
    context: Context = request.app.state.context
    return context

"""The loop of a worker: needs nothing but the standard library, so that any interpreter runs it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(start: Callable[[dict[str, Any]], tuple[Any, str]]) -> None:
    """Start an engine with the settings of the command line, then answer a request per line.

    `start` returns the engine, which has a method per request, and its version.
    """
    # Libraries print to standard output as they like: the replies get a copy that only we know.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine, version = start(json.loads(sys.argv[1]))
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"version": version})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply(getattr(engine, request.pop("do"))(**request))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})

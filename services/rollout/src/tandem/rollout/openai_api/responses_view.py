"""Responses in the form of the Responses API: output items, and the events of their streams.

A stream has an item for each stretch of reasoning, text and calls, in the order in which the model makes them. A whole
answer has reasoning, text and calls in this order, once each.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from tandem.rollout.openai_api import choices, protocol, refusals
from tandem.rollout.openai_api.generator import ServedModel
from tandem.rollout.openai_api.responses_request import ResponsesRequest, echo_fields, item_id

ResponseEvent = dict[str, Any]
"""An event of a stream: its type, its number, and what belongs to the type."""
TextKind = Literal["reasoning", "message"]
_PARTS: dict[TextKind, str] = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of the content of an item, which the names of its events have as well."""


class ResponsesView:
    """The form of one response."""

    closing = b""
    """A stream ends with its last event."""

    def __init__(
        self,
        model: ServedModel,
        request: ResponsesRequest,
        chat_request: protocol.ChatRequest,
        job: choices.GenerationJob,
    ) -> None:
        self._model = model
        self._request = request
        self._chat_request = chat_request
        self._job = job
        self._key = secrets.token_hex(12)
        self._created = int(time.time())
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        """Items so far; the last one may be open."""
        self._text: list[str] | None = None
        """Texts of the open item; None if none is open."""
        self._token_logprobs: list[Any] = []
        """Log-probabilities since the last text of a message."""
        self._reasoning: list[str] = []
        self._pieces: list[choices.ResponsePiece] = []

    def answer(self, pieces: Sequence[choices.ResponsePiece]) -> ResponseEvent:
        """Return the whole answer."""
        (piece,) = pieces
        for _ in self.chunks(0, piece):
            pass
        for _ in self._finish():
            pass
        return self._response(self._status)

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the start of a stream."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def chunks(self, number: int, piece: choices.ResponsePiece) -> Iterator[ResponseEvent]:
        """Yield the events of a piece of the response."""
        self._pieces.append(piece)
        if self._request.wants_logprobs:
            self._token_logprobs += msgspec.to_builtins(choices.describe_tokens(self._model, self._chat_request, piece))
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
            yield from self._add_text("reasoning", piece.reasoning)
        if piece.text:
            yield from self._add_text("message", piece.text)
        for call in piece.tool_calls:
            yield from self._add_call(call)

    def end(self, num_tokens: int) -> Iterator[ResponseEvent]:
        """Yield the end of a stream: what is open is closed, and the response is shown."""
        yield from self._finish()
        status = self._status
        yield self._event(f"response.{status}", response=self._response(status))

    def encode(self, chunk: ResponseEvent) -> bytes:
        """Return an event of a stream."""
        return choices.encode_event(msgspec.json.encode(chunk), chunk["type"])

    def encode_error(self, error: refusals.OpenAIRefused) -> bytes:
        """Return an error after the beginning of a stream; clients of chats look for it in ``error``."""
        body = error.body
        fields = {"code": body.code, "message": body.message, "param": body.param}
        return self.encode(self._event("error", **fields, error=body))

    # --- items -------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._pieces[-1].finish_reason == "length" else "completed"

    def _add_text(self, kind: TextKind, text: str) -> Iterator[ResponseEvent]:
        if self._text is None or self._output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        assert self._text is not None
        self._text.append(text)
        logprobs = {"logprobs": self._take_logprobs()} if kind == "message" else {}
        yield self._part_event(f"response.{_PARTS[kind]}.delta", delta=text, **logprobs)

    def _open(self, kind: TextKind) -> Iterator[ResponseEvent]:
        if kind == "reasoning":
            fields: dict[str, Any] = {"id": self._next_id("rs"), "summary": [], "encrypted_content": None}
        else:
            fields = {"id": self._next_id("msg"), "role": "assistant"}
        self._output.append({"type": kind, **fields, "status": "in_progress", "content": []})
        yield self._item_event("response.output_item.added")
        self._text = []
        part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        self._output[-1]["content"].append(part | ({"annotations": [], "logprobs": []} if kind == "message" else {}))
        yield self._part_event("response.content_part.added", part={**self._part})

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """Close the open item, if there is one."""
        if self._text is None:
            return
        item, part = self._output[-1], self._part
        part["text"] = "".join(self._text)
        logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._part_event(f"response.{_PARTS[item['type']]}.done", text=part["text"], **logprobs)
        yield self._part_event("response.content_part.done", part={**part})
        item["status"], self._text = status, None
        yield self._item_event("response.output_item.done")

    def _add_call(self, call: protocol.ToolCall) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        item = {"type": "function_call", "id": self._next_id("fc"), "call_id": call.id, "name": call.function.name}
        self._output.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item_event("response.output_item.added")
        place, arguments = len(self._output) - 1, call.function.arguments
        event = {"item_id": item["id"], "output_index": place}
        yield self._event("response.function_call_arguments.delta", **event, delta=arguments)
        done_fields = {**event, "arguments": arguments, "name": call.function.name}
        yield self._event("response.function_call_arguments.done", **done_fields)
        self._output[-1] |= {"arguments": arguments, "status": "completed"}
        yield self._item_event("response.output_item.done")

    def _finish(self) -> Iterator[ResponseEvent]:
        """Close what is open; a response without anything to show is an empty message."""
        has_answer = any(item["type"] != "reasoning" for item in self._output)
        if not has_answer and (self._status == "completed" or not self._output):
            yield from self._close("completed")
            yield from self._open("message")
        if self._text is not None and self._output[-1]["type"] == "message":
            self._take_logprobs()
        yield from self._close(self._status)
        if self._chat_request.return_token_ids:
            self._output[-1] |= {
                "prompt_token_ids": self._job.prompts[0],
                "generation_token_ids": [token_id for piece in self._pieces for token_id in piece.token_ids],
                "generation_log_probs": [logprob for piece in self._pieces for logprob in piece.logprobs],
            }

    @property
    def _part(self) -> dict[str, Any]:
        """The content of the open item."""
        part: dict[str, Any] = self._output[-1]["content"][-1]
        return part

    def _take_logprobs(self) -> list[Any]:
        """Move the log-probabilities since the last text to the open message; return them."""
        token_logprobs, self._token_logprobs = self._token_logprobs, []
        self._part["logprobs"] = [*self._part["logprobs"], *token_logprobs]
        return token_logprobs

    def _next_id(self, kind: Literal["rs", "msg", "fc"]) -> str:
        return item_id(kind, self._key, len(self._output))

    # --- events ------------------------------------------------------------------------------------------------------

    def _event(self, type_name: str, /, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return {"type": type_name, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, name: str) -> ResponseEvent:
        item = self._output[-1]
        shown_item = {**item, "content": [*item["content"]]} if "content" in item else {**item}
        return self._event(name, output_index=len(self._output) - 1, item=shown_item)

    def _part_event(self, name: str, **fields: Any) -> ResponseEvent:
        item, place = self._output[-1], len(self._output) - 1
        return self._event(name, item_id=item["id"], output_index=place, content_index=0, **fields)

    def _response(self, status: Literal["in_progress", "completed", "incomplete"]) -> ResponseEvent:
        is_over = status != "in_progress"
        response: dict[str, Any] = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model.name,
            "output": [*self._output],
            "parallel_tool_calls": self._chat_request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._chat_request.temperature,
            "tool_choice": self._chat_request.tool_choice or "auto",
            "top_p": self._chat_request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **echo_fields(self._request),
        }
        versions = choices.versions_of(self._model, self._pieces)
        return response | ({"weight_versions": versions} if is_over and versions is not msgspec.UNSET else {})

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = len(self._job.prompts[0]), sum(len(piece.token_ids) for piece in self._pieces)
        reasoning = "".join(self._reasoning)
        num_reasoning = len(self._model.tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, num_output)},
            "total_tokens": num_input + num_output,
        }

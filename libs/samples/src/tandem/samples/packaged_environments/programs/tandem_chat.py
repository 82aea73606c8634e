"""A harness of verifiers: a chat with tools in this process, as its own `null` is in another.

verifiers finds it by its id, ``tandem-chat``. A program for each episode would take a second of a core, and `uv`.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

connections = openai.AsyncOpenAI(base_url="http://unknown", api_key="unknown", timeout=None, max_retries=0)
"""Connections that all episodes share."""


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings of its own."""


class ConversationFull(Exception):
    """The end of a conversation that leaves no room for another reply."""


class ToolGate:
    """The rollout's permission to carry out a call, where the task asks for one."""

    def __init__(self, client: httpx.AsyncClient, url: str, secret: str) -> None:
        self._place = (client, url, secret)

    async def explain_denial(self, call: Any) -> dict[str, Any] | None:
        """Return the message in the place of a denied call's result; None if it may be carried out."""
        decision = await gate_tool_call(*self._place, call)
        return dict(bound_tool_message(decision["message"])) if decision["action"] == "deny" else None


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A chat that calls the task's tools until a reply calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Play one segment of a conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += [message_to_wire(message) for message in prompt]
        policy = connections.with_options(base_url=endpoint, api_key=secret)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, places, clients = await connect_mcp({"mcpServers": servers}, stack)
            gate = None
            if tool_interception_url:
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
                gate = ToolGate(client, tool_interception_url, secret)
            with contextlib.suppress(ConversationFull):
                while calls := await _ask(policy, ctx.model, messages, tools):
                    for call in calls:
                        denial = None if gate is None else await gate.explain_denial(call)
                        messages.append(denial or await _carry_out(call, clients, places))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(policy: Any, model: str, messages: list[Any], tools: list[Any]) -> list[Any]:
    """Add the policy's reply to the messages; return what it calls. Raises `ConversationFull`."""
    options = {"tools": tools} if tools else {}
    try:
        answer = await policy.chat.completions.create(model=model, messages=messages, **options)
    except openai.APIStatusError as error:
        if is_context_overflow(error):
            raise ConversationFull from error
        raise
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.tool_calls or []


async def _carry_out(call: Any, clients: Any, places: Any) -> dict[str, Any]:
    """Return the message with the result of a call, or with what is wrong with it, in verifiers' words."""
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        content = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    else:
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            content = f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
        elif name not in places:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(clients, places, name, arguments)
    message = {"role": "tool", "tool_call_id": call.id, "content": content, "name": name}
    return dict(bound_tool_message(message))

"""A bare FastAPI application of the same shape as the chat endpoint: a pydantic body, server-sent events, nothing behind it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel


class Message(BaseModel):
    role: str
    content: str


class Chat(BaseModel):
    model: str
    messages: list[Message]
    stream: bool = False
    delay_ms: float = 0.0


app = FastAPI()


@app.post("/v1/chat/completions")
async def chat(body: Chat) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": int(time.time()), "model": body.model}
        for word in body.messages[-1].content.split():
            if body.delay_ms:
                await asyncio.sleep(body.delay_ms / 1000)
            choice = {"index": 0, "delta": {"content": word + " "}, "finish_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [choice]}, separators=(',', ':'))}\n\n"
        yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': {}, 'finish_reason': 'stop'}]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@app.get("/health")
async def health() -> dict[str, str]:
    return {}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="error", access_log=False)

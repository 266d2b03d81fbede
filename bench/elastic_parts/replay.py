"""A harness that replays one record: it waits, and it asks the model for so many tokens. Standard library only.

`records.json` in the workspace holds one record per execution of the group: pairs [seconds to wait, tokens to ask for],
after the last call nothing is waited for. Which one is this execution's, its id says. At the end every second execution of a
group leaves a module that the hidden test passes on, so that a group always has something to teach.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... GYRE_EXECUTION=...-x03 python -I -S replay.py
"""

import json
import os
import socket
import sys
import time

PATIENCE_S = 120.0
Message = dict[str, str]


def post(base_url: str, key: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own; status 0 if it broke."""
    authority, _, path = base_url.partition("://")[2].partition("/")
    host, _, port = authority.partition(":")
    head = (f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {authority}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n")
    received = b""
    try:
        with socket.create_connection((host, int(port or 80)), timeout=PATIENCE_S) as connection:
            connection.sendall(head.encode() + body)
            while data := connection.recv(65536):
                received += data
        header, _, answer = received.partition(b"\r\n\r\n")
        return int(header.split(b" ", 2)[1]), answer
    except (OSError, ValueError, IndexError):
        return 0, received


def ask(messages: list[Message], num_tokens: int) -> tuple[str, int]:
    """The reply's text and how many tokens it has. Whoever is busy or away is asked again with the identical body."""
    body = json.dumps({"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages, "max_tokens": num_tokens})
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status, answer = post(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], body.encode())
        if status == 200:
            reply = json.loads(answer)
            return reply["choices"][0]["message"]["content"] or "", reply["usage"]["completion_tokens"]
        if status not in (0, 408, 409, 429) and status < 500 or time.monotonic() > deadline:
            raise SystemExit(f"model request failed with status {status}: {answer[:500]!r}")
        time.sleep(0.2)


def replay(record: list[tuple[float, int]]) -> None:
    """Every wait and every call, one after another. A reply that ends early is asked to go on."""
    messages = [{"role": "user", "content": "begin"}]
    for wait_s, num_tokens in record:
        time.sleep(wait_s)
        left = num_tokens
        while left > 0:
            text, num = ask(messages, left)
            left -= max(num, 1)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]


def main() -> None:
    number = int(os.environ["GYRE_EXECUTION"].rpartition("-x")[2])
    with open("records.json", encoding="utf-8") as file:  # noqa: PTH123 - pathlib would double the start-up time
        records = json.load(file)
    replay(records[number % len(records)])
    with open("outcome.py", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(f"PASSED = {number % 2 == 0}\n")
    sys.exit(0)


if __name__ == "__main__":
    main()

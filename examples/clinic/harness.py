"""The clinic's agent harness: a black box that knows nothing about training. Standard library only.

It reads the instruction, runs the workspace's visible tests, and shows the report to the model once. The model answers
with one-line commands, `F a 2`: apply repair 2 to module a. Each edits the real file and is answered with the state of
that module and the next module that fails, `a . c`. After every third command the harness compacts: the model's own
summary replaces the context. It ends after nine commands.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... [GYRE_TASK_INSTRUCTION=FILE] python -I -S harness.py [INSTRUCTION_FILE]

It is started once per execution, so it imports little: one socket instead of http.client halves its start-up time.
"""

import json
import os
import re
import socket
import sys
import time

NAMES = "abcdef"
NUM_COMMANDS = 9
COMMANDS_PER_CONTEXT = 3
COMMAND_TOKENS = 4
SUMMARY_TOKENS = 13
RETRY_FOR_S = 120.0

Message = dict[str, object]


class Endpoint:
    """One keep-alive HTTP/1.1 connection to an OpenAI-compatible server."""

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http" or not rest:
            raise SystemExit(f"OPENAI_BASE_URL = {base_url!r}: must start with http://")
        self.authority, _, path = rest.partition("/")
        host, _, port = self.authority.partition(":")
        self.address = (host, int(port or 80))
        self.path = f"/{path.strip('/')}/chat/completions".replace("//", "/")
        self.api_key = api_key
        self.model = model
        self.connection: socket.socket | None = None
        self.received = b""

    def ask(self, messages: list[Message], max_tokens: int) -> str:
        """The reply's text."""
        return self.complete({"messages": messages, "max_tokens": max_tokens})["content"] or ""

    def complete(self, request: dict[str, object]) -> dict[str, object]:
        """The reply as a message. Busy, failing and absent servers are asked again with the identical body."""
        body = json.dumps({"model": self.model, **request}).encode()
        deadline, pause = time.monotonic() + RETRY_FOR_S, 0.2
        while True:
            status, answer = self.post(body)
            if status == 200:
                return json.loads(answer)["choices"][0]["message"]
            if not (status in (0, 408, 409, 429) or status >= 500) or time.monotonic() > deadline:
                raise SystemExit(f"model request failed with status {status}: {answer[:500]!r}")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body; status 0 when the server cannot be reached or the connection broke."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.authority}\r\nAuthorization: Bearer {self.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            if self.connection is None:
                self.connection = socket.create_connection(self.address, timeout=RETRY_FOR_S)
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.sendall(head.encode() + body)
            return self.read_answer()
        except (OSError, ValueError) as error:
            self.close()
            return 0, str(error).encode()

    def read_answer(self) -> tuple[int, bytes]:
        lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ", 2)[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        if "chunked" in headers.get("transfer-encoding", ""):
            answer = self.read_chunks()
        else:
            answer = self.read_exactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status, answer

    def read_chunks(self) -> bytes:
        answer = b""
        while size := int(self.read_until(b"\r\n").split(b";")[0], 16):
            answer += self.read_exactly(size)
            self.read_until(b"\r\n")
        while self.read_until(b"\r\n"):
            pass
        return answer

    def read_until(self, mark: bytes) -> bytes:
        while mark not in self.received:
            self.receive()
        found, _, self.received = self.received.partition(mark)
        return found

    def read_exactly(self, size: int) -> bytes:
        while len(self.received) < size:
            self.receive()
        found, self.received = self.received[:size], self.received[size:]
        return found

    def receive(self) -> None:
        assert self.connection is not None
        data = self.connection.recv(65536)
        if not data:
            raise OSError("the server closed the connection")
        self.received += data

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.received = None, b""


def repair(text: str, kind: int) -> str:
    """The module's text after repair ``kind``, which changes nothing where its bug is not there."""
    if kind == 1:
        return re.sub(r"return total [-*] ", "return total + ", text)
    if kind == 2:
        return re.sub(r"range\((?:1, )?len\((\w+)\)(?: - 1)?\)", r"range(len(\1))", text)
    if kind == 3:
        meant = re.search(r"The (\w+) is (\d+)\.", text)
        return text if meant is None else re.sub(rf"(?mi)^{meant[1]} = \d+$", f"{meant[1].upper()} = {meant[2]}", text)
    return re.sub(r"(\w+)\(([A-Z]+), (\w+)\)", r"\1(\3, \2)", text)


def visible_tests(directory: str = ".") -> dict[str, object]:
    """The test functions of a directory of the workspace by name."""
    tests: dict[str, object] = {}
    exec(compile(read(f"{directory}/test_visible.py"), "test_visible.py", "exec"), tests)
    return tests


def run_test(name: str, kind: int, tests: dict[str, object]) -> bool:
    try:
        tests[f"test_{name}_{kind}"]()  # type: ignore[operator]
    except Exception:  # whatever the code under test raises is a failed test
        return False
    return True


def state_of(name: str, tests: dict[str, object], directory: str = ".") -> str:
    """The number of the first visible test of a module that fails, or "." when all pass."""
    module = type(sys)(name)
    sys.modules[name] = module
    try:
        exec(compile(read(f"{directory}/{name}.py"), f"{name}.py", "exec"), module.__dict__)
    except Exception:  # a module that does not even import fails every test
        module.__dict__.clear()
    return next((str(kind) for kind in range(1, 5) if not run_test(name, kind, tests)), ".")


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib would double the start-up time
        return file.read()


def next_failing(name: str, states: dict[str, str]) -> str:
    """The first failing module after this one, in a circle; "." when every module passes."""
    names = list(states)
    place = names.index(name) + 1
    circle = names[place:] + names[:place]
    return next((other for other in circle if states[other] != "."), ".")


def obey(command: str, tests: dict[str, object], states: dict[str, str], directory: str = ".") -> str:
    """Edits a directory's modules as the model's command says and tests again; returns the observation."""
    words = command.split()
    if len(words) != 3 or words[0] != "F" or words[1] not in states or words[2] not in ("1", "2", "3", "4"):
        return f"? ? {next_failing(list(states)[-1], states)}"
    name = words[1]
    path = f"{directory}/{name}.py"
    before = read(path)
    after = repair(before, int(words[2]))
    if after != before:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(after)
        states[name] = state_of(name, tests, directory)
    return f"{name} {states[name]} {next_failing(name, states)}"


def work(endpoint: Endpoint, instruction: str) -> None:
    tests = visible_tests()
    states = {name: state_of(name, tests) for name in NAMES}
    report = " ".join(f"{name} {state}" for name, state in states.items())
    messages: list[Message] = [{"role": "user", "content": f"{instruction}\n{report}"}]
    for number in range(1, NUM_COMMANDS + 1):
        command = endpoint.ask(messages, COMMAND_TOKENS)
        observation = obey(command, tests, states)
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": observation}]
        if number % COMMANDS_PER_CONTEXT == 0 and number < NUM_COMMANDS:
            messages[-1]["content"] = f"{observation}\ncompact"
            summary = endpoint.ask(messages, SUMMARY_TOKENS)
            messages = [{"role": "user", "content": f"{instruction}\n{summary}"}]


def main() -> None:
    environment = os.environ
    endpoint = Endpoint(
        environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"], environment.get("OPENAI_MODEL", "policy")
    )
    instruction = environment.get("GYRE_TASK_INSTRUCTION") or (sys.argv[1] if len(sys.argv) > 1 else "instruction.md")
    work(endpoint, " ".join(read(instruction).split()))


if __name__ == "__main__":
    main()

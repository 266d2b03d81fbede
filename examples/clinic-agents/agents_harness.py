"""An agent harness with sub-agents: a black box that says nothing about who is asking. Standard library only.

The main agent sees three directories and how many modules fail in each. A turn of it is a call of the tool `agent`,
`{"task": "repair x now"}`, or a command of its own, `F a 2`: apply repair 2 to module a. Both are answered with how
many modules of that directory fail, `x 1`, and the next directory where any does, `y`. A sub-agent has a context of its
own: the directory's test report, the task, four commands as in the clinic, and at the end a report, which goes back to
the main agent as the tool's result, word for word. Both kinds of agent are compacted after two turns or commands: their
own summary replaces their context.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... [GYRE_TASK_INSTRUCTION=FILE] python -I -S agents_harness.py [CLINIC]

CLINIC is the directory of the clinic's harness, whose endpoint and commands this one uses.
"""

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would double the start-up time
sys.path.insert(0, sys.argv[1] if __name__ == "__main__" and len(sys.argv) > 1 else HERE + "/../clinic")

from harness import Endpoint, Message, next_failing, obey, read, state_of, visible_tests  # noqa: E402

DIRECTORIES = {"x": "abc", "y": "def", "z": "ghi"}
NUM_TURNS = 4
TURNS_PER_CONTEXT = 2
NUM_COMMANDS = 4
COMMANDS_PER_CONTEXT = 2
TURN_TOKENS = 4
SUMMARY_TOKENS = 7
REPORT_TOKENS = 3
NOBODY = ("? ?", list(DIRECTORIES)[-1])  # the outcome of a turn that makes no sense
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "agent",
            "description": "Sends an agent to do a task; its report is the result.",
            "parameters": {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
        },
    }
]


class Directory:
    """Some modules of the workspace with their visible tests."""

    def __init__(self, name: str, modules: str) -> None:
        self.name = name
        self.tests = visible_tests(name)
        self.states = {module: state_of(module, self.tests, name) for module in modules}

    def report(self) -> str:
        return " ".join(f"{module} {state}" for module, state in self.states.items())

    def num_failing(self) -> str:
        """As the main agent sees it, "." when every module passes."""
        return str(sum(state != "." for state in self.states.values()) or ".")

    def obey(self, command: str) -> str:
        return obey(command, self.tests, self.states, self.name)


class Agents:
    """The main agent and those it sends; all of them work on the same files, one after the other."""

    def __init__(self, endpoint: Endpoint, instruction: str) -> None:
        self.endpoint, self.instruction = endpoint, instruction
        self.directories = {name: Directory(name, modules) for name, modules in DIRECTORIES.items()}

    def work(self) -> None:
        """The main agent's turns."""
        messages: list[Message] = [{"role": "user", "content": f"{self.instruction}\n{self.overview()}"}]
        for number in range(1, NUM_TURNS + 1):
            reply = self.endpoint.complete({"messages": messages, "max_tokens": TURN_TOKENS, "tools": TOOLS})
            outcomes, name = self.outcomes(reply)
            messages += [reply, *outcomes, {"role": "user", "content": self.next_failing(name)}]
            if number % TURNS_PER_CONTEXT == 0 and number < NUM_TURNS:
                messages[-1]["content"] = f"{messages[-1]['content']}\ncompact"
                summary = self.endpoint.complete({"messages": messages, "max_tokens": SUMMARY_TOKENS, "tools": TOOLS})
                messages = [{"role": "user", "content": f"{self.instruction}\n{summary['content'] or ''}"}]

    def overview(self) -> str:
        """The directories where modules fail and how many, `x 3 . . z 2`."""
        counts = {name: directory.num_failing() for name, directory in self.directories.items()}
        return " ".join(f"{name} {count}" if count != "." else ". ." for name, count in counts.items())

    def outcomes(self, reply: Message) -> tuple[list[Message], str]:
        """Does what a reply asks for; the messages that answer it, and the directory it was about."""
        calls = reply.get("tool_calls")
        if not calls:
            outcome, name = self.obey(str(reply["content"] or ""))
            return [{"role": "user", "content": outcome}], name
        messages: list[Message] = []
        for call in calls:
            outcome, name = self.delegate(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": outcome})
        return messages, name

    def next_failing(self, name: str) -> str:
        """The first directory after this one where a module fails, in a circle."""
        return next_failing(name, {each.name: each.num_failing() for each in self.directories.values()})

    def obey(self, command: str) -> tuple[str, str]:
        """A command of the main agent itself, in whichever directory the module is."""
        words = command.split()
        owner = next((d for d in self.directories.values() if len(words) > 1 and words[1] in d.states), None)
        if owner is None or owner.obey(command).startswith("?"):
            return NOBODY
        return f"{owner.name} {owner.num_failing()}", owner.name

    def delegate(self, function: dict[str, str]) -> tuple[str, str]:
        """Runs a sub-agent; what it says last."""
        try:
            task = json.loads(function["arguments"])["task"]
            repair, name, now = task.split()
            directory = self.directories[name]
        except (ValueError, KeyError, TypeError, AttributeError):
            return NOBODY
        if (function["name"], repair, now) != ("agent", "repair", "now"):
            return NOBODY
        return self.sub_agent(directory, task), name

    def sub_agent(self, directory: Directory, task: str) -> str:
        messages: list[Message] = [
            {"role": "system", "content": f"modules {directory.report()}"},
            {"role": "user", "content": task},
        ]
        for number in range(1, NUM_COMMANDS + 1):
            command = self.endpoint.ask(messages, TURN_TOKENS)
            observation = directory.obey(command)
            messages += [{"role": "assistant", "content": command}, {"role": "user", "content": observation}]
            if number == COMMANDS_PER_CONTEXT:
                messages[-1]["content"] = f"{observation}\ncompact"
                summary = self.endpoint.ask(messages, SUMMARY_TOKENS)
                messages = [{"role": "system", "content": "modules"}, {"role": "user", "content": f"{task}\n{summary}"}]
        messages[-1]["content"] = f"{messages[-1]['content']}\nreport"
        return self.endpoint.ask(messages, REPORT_TOKENS)


def main() -> None:
    environment = os.environ
    endpoint = Endpoint(
        environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"], environment.get("OPENAI_MODEL", "policy")
    )
    instruction = read(environment.get("GYRE_TASK_INSTRUCTION", "instruction.md"))
    Agents(endpoint, " ".join(instruction.split())).work()


if __name__ == "__main__":
    main()

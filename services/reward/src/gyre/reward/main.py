"""`gyre-reward evaluator --config run.toml --deployment deployment.toml --index N`: one evaluator process."""

from pathlib import Path

from gyre.reward.config import evaluator_config, open_grader
from gyre.reward.evaluation import Evaluation, TasksRoot
from gyre.reward.evaluator import Evaluator
from gyre.reward.rpc import SERVICE, RewardRpc
from gyre.reward.scratch import open_scratch
from gyre.runtime.process import Process, add_arguments, parser, run
from gyre.runtime.rpc import Server


async def serve(process: Process) -> None:
    """Evaluate until asked to stop."""
    config = evaluator_config(process.config, process.config_dir, process.deployment, process.index)
    scratch = open_scratch(Path(process.deployment.state_dir), config.snapshot.total_bytes)
    grader = open_grader(config, scratch.path)
    evaluation = Evaluation(grader, process.blobs, TasksRoot(config.tasks_root), config.snapshot, config.budget,
                            process.clock, process.name)
    bus = await process.connect()
    evaluator = Evaluator(bus, process.blobs, evaluation, config.budget, process.clock, process.run, process.name)
    server = Server(config.listen, [(SERVICE, RewardRpc(process, evaluation, evaluator).register)])
    try:
        await server.start()
        await server.set_serving(True)
        await evaluator.run_until(process.stopping)
    finally:
        await server.stop()
        await grader.close()
        await bus.close()
        scratch.close()


def main() -> None:
    arguments = parser("gyre-reward", __doc__ or "")
    commands = arguments.add_subparsers(required=True, metavar="evaluator")
    add_arguments(commands.add_parser("evaluator", help="score preserved workspaces"), "index")
    run(serve, "reward", "reward", arguments.parse_args())


if __name__ == "__main__":
    main()

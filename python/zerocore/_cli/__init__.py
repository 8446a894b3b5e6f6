"""The console command `zerocore`: starts jobs, and what else is done from a shell."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass

from zerocore import __version__
from zerocore.errors import Error


@dataclass(frozen=True)
class Command:
    """A subcommand: the module with its `add_arguments(parser)` and `run(arguments) -> int`, loaded on use."""

    module: str
    summary: str


COMMANDS = {
    "export": Command(
        "zerocore._cli.export", "a checkpoint's weights as safetensors, for Hugging Face and plain torch"
    ),
    "import-deepspeed": Command("zerocore._cli.import_deepspeed", "a DeepSpeed checkpoint, made one of zerocore's"),
    "inspect": Command("zerocore._cli.inspect", "what is in a checkpoint, and whether it is whole"),
    "plan": Command("zerocore._cli.plan", "what training holds on a rank in each ZeRO stage, and what fits"),
    "report": Command("zerocore._cli.report", "what zerocore finds on this machine, and whether two ranks work"),
}

LAUNCH = Command("zerocore._cli.launch", "start a script on several ranks")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is not None:
        parser = argparse.ArgumentParser(f"zerocore {arguments[0]}", description=command.summary, allow_abbrev=False)
        arguments = arguments[1:]
    else:
        command = LAUNCH
        parser = argparse.ArgumentParser("zerocore", allow_abbrev=False)
        parser.add_argument("--version", action="version", version=f"zerocore {__version__}")
        lines = [f"  zerocore {name:<18}{each.summary}" for name, each in COMMANDS.items()]
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "\n".join(["other commands:", *lines])
    module = importlib.import_module(command.module)
    module.add_arguments(parser)
    try:
        code = int(module.run(parser.parse_args(arguments)))
        sys.stdout.flush()
        return code
    except Error as error:
        print(f"zerocore: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 0

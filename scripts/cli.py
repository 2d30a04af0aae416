"""The `headsmith` command. Sub-commands are imported when one is called, so that --help answers at once."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import version

import click

# Name -> (module of this package, one line of help).
COMMANDS = {
    "target": "Write the embedded target as a plain Hugging Face folder.",
    "generate": "Let the target answer the recipe's prompts; resumes.",
    "preview": "Show what is trained on: coloured masks, dropped rows by reason, sizes.",
    "decode": "Answer a prompt with draft heads, streaming.",
    "chat": "Talk with a target, with draft heads; what was said stays in the caches.",
    "calibrate": "Measure what decoding costs on this machine, for the calibrated tree.",
    "bench": "Measure every method against plain decoding, in one run.",
}


class LazyGroup(click.Group):
    """Knows its sub-commands by name and help; imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return import_module(f"headsmith.scripts.{name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("headsmith"), prog_name="headsmith")
def main_group() -> None:
    """Train draft heads for a causal LM on its own text, and decode with them without changing an answer.

    Training is launched with: accelerate launch -m headsmith.training.train RECIPE [key=value …]
    """


def main() -> None:
    """Run the command line; what a user can mend is a message and exit code 2, not a traceback."""
    try:
        main_group(standalone_mode=False)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit("interrupted")
    except Exception as error:
        ours = type(error).__module__.startswith("headsmith") or isinstance(error, ValueError | OSError | TypeError)
        if not ours or os.environ.get("HEADSMITH_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

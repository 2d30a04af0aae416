"""headsmith chat --target T --heads DIR"""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from .answering import answer_arguments, answer_options, notes_afterwards, stats_line
from .common import open_heads, open_target, render, target_options


@click.command("chat")
@target_options
@answer_options
def command(
    target_name: str,
    dtype: str,
    threads: int | None,
    any_target: bool,
    trust_remote_code: bool,
    heads: str | None,
    system: str | None,
    tree: str,
    stats: bool,
    **answering: Any,
) -> None:
    """Talk with the target. What was said stays in the caches, so that each turn only reads what is new.

    /new begins a new conversation, Ctrl-C stops an answer, Ctrl-D or /exit ends. Turns may be piped in, a line each.
    """
    from headsmith.inference import SpeculativeDecoder

    target = open_target(target_name, dtype, threads, trust_remote_code)
    drafter = open_heads(heads, target, any_target) if heads else None
    chat = Conversation(SpeculativeDecoder(target, drafter, tree=tree), system, answer_arguments(target, **answering))
    for line in _turns():
        if line == "/exit":
            break
        if line == "/new":
            chat.begin()
        elif line:
            try:
                summary = chat.say(line)
            except ValueError as error:
                if not sys.stdin.isatty():
                    raise
                click.echo(f"error: {error}", err=True)
                continue
            if stats:
                click.echo(summary, err=True)


class Conversation:
    """Messages so far, and the past of the text that they are.

    Args: arguments: of the decoder's `generate`, for every answer.
    """

    def __init__(self, decoder: Any, system: str | None, arguments: dict[str, Any]) -> None:
        self.decoder, self.system, self.arguments = decoder, system, arguments
        self.begin()

    def begin(self) -> None:
        """Forget what was said."""
        from headsmith.inference import Past

        self.past = Past()
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> str:
        """Answer a turn, streaming; return a line on how it went. An interrupted answer stays as far as it got."""
        self.messages.append({"role": "user", "content": text})
        target = self.decoder.target
        prompt = render(target, self.messages)
        shown = _streamer(target.tokenizer)
        start = time.perf_counter()
        try:
            with notes_afterwards():
                out = self.decoder.generate(prompt, streamer=shown, past=self.past, **self.arguments)
            summary = stats_line(out.stats, time.perf_counter() - start, prompt.shape[1])
        except KeyboardInterrupt:
            shown.end()
            summary = "[interrupted]"
        except ValueError:
            self.messages.pop()  # a turn that cannot be answered was not said
            raise
        self.messages.append({"role": "assistant", "content": shown.text})
        return summary


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Shown(TextStreamer):
        """Prints text as it comes, and remembers it."""

        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            super().on_finalized_text(text, stream_end)

    return Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _turns() -> Any:
    """Lines of the user, with a prompt and a history of lines where somebody is typing."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  (input() then has a history and can be edited)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit ends)")

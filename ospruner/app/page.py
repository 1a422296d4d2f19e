"""The page of `ospruner app`, in Gradio: question, knobs, examples, two columns.

It asks nobody but its own server: no analytics, no fonts and no scripts from elsewhere.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from modeling_ospruner.modeling_ospruner import OSPrunerForCausalLM
from ospruner.optional import needed

from .columns import Column, Question, Source, columns_html
from .turns import LocalSource

__all__ = [
    "EXAMPLES",
    "PIP_LINE",
    "build_page",
    "open_app",
    "open_source",
    "question_of",
    "running_app",
]

# Problems that the embedded reasoner understands, too.
EXAMPLES = (
    "Solve 3x+54=102 for x.",
    "Tom has 45 cards. Tom buys 17. The total grows 3 times. Tom gives away 28. "
    "How many cards does Tom have?",
    "What is the remainder when 397 is divided by 23?",
    "Find x and y with x+y=17 and x*y=66. Give the larger number.",
    "Which is larger, 24*7 or 131+29? Give its value.",
)
PIP_LINE = "pip install 'ospruner[app]'"
_Number = TypeVar("_Number", int, float)
_MOST_CHARACTERS = 20_000
_MOST_TOKENS = 4096
# On a narrow window the columns lie below the fold.
_SHOW_COLUMNS = """(...values) => {
  document.querySelector("#columns").scrollIntoView({behavior: "smooth", block: "start"});
  return values;
}"""
_CSS = Path(__file__).with_name("page.css")


def open_source(
    policy: str | None, url: str | None = None, revision: str | None = None, base: str | None = None
) -> Source:
    """What the page asks: a policy that is loaded into this process, or a server.

    Args:
        policy: Folder or Hub id of a policy.
        url: Address of a server of `ospruner serve`, instead.
        revision: Commit, branch or tag of the policy on the Hub.
        base: The base's name on the page; None for the one that the policy pins.

    Raises:
        ValueError: Both are given, or neither.
        ConnectionError: Nobody answers at the address.
        MissingPackageError: The package openai is needed for a server, and not installed.
        OSError: There is no such policy.
    """
    if (policy is None) is (url is None):
        raise ValueError(
            f"policy is {policy!r} and --url {url!r}: name a policy, or a server that serves one"
        )
    if url is not None:
        from .served import ServedSource

        return ServedSource(url)
    assert policy is not None
    hub: dict[str, Any] = {"revision": revision} if revision else {}
    model = OSPrunerForCausalLM.from_pretrained(
        policy, dtype="auto", device_map=_device_map(), **hub
    )
    return LocalSource(model, Path(policy).name if Path(policy).is_dir() else policy, base)


def _device_map() -> str | None:
    """Accelerators are used as transformers spreads a base over them; a CPU needs no map."""
    import torch

    return "auto" if torch.accelerator.is_available() else None


def build_page(source: Source) -> Any:
    """The page, as Gradio's `Blocks`.

    Args:
        source: What it asks.

    Raises:
        MissingPackageError: Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported
    gr: Any = needed("gradio", "the page of `ospruner app`", PIP_LINE)
    most = min(_MOST_TOKENS, source.positions or _MOST_TOKENS)
    with gr.Blocks(title="OS-Pruner", analytics_enabled=False) as page:
        name = (
            source.policy if source.policy == source.base else f"{source.policy} on {source.base}"
        )
        gr.Markdown(f"# OS-Pruner\n\nThe same question twice: the base as it is, and stopped by a "
                    f"policy at the right paragraph. `{name}`")  # fmt: skip
        with gr.Row(equal_height=True):
            question = gr.Textbox(
                label="Question", lines=3, max_lines=6, scale=5, autofocus=True,
                elem_id="question", max_length=_MOST_CHARACTERS,
                placeholder="A problem with one answer: a number, an expression",
            )  # fmt: skip
            with gr.Column(scale=1, min_width=140):
                ask = gr.Button("Ask both", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", elem_id="stop")
        gr.Examples([[one] for one in EXAMPLES], question, label="Examples", cache_examples=False)
        with gr.Accordion("Knobs", open=False, elem_id="knobs"):
            with gr.Row():
                mode = gr.Radio(
                    [("draw", "sample"), ("threshold", "threshold")], value=source.mode,
                    label="The policy stops", min_width=220,
                    info="by a draw with its probability, or from a threshold on",
                )  # fmt: skip
                threshold = gr.Slider(
                    0, 1, source.threshold, step=0.01, label="Threshold", elem_id="threshold",
                    visible=source.mode == "threshold", min_width=220,
                )  # fmt: skip
                low, high = source.prices or (0.0, 1.0)
                price = gr.Textbox(
                    "", label="Price λ", elem_id="price",
                    visible=source.prices is not None,
                    info=f"price of a thinking token, {low:g} to {high:g}", min_width=220,
                    placeholder="the policy's own", max_lines=1,
                )  # fmt: skip
                budget = gr.Textbox(
                    "", label="Budget", elem_id="budget", placeholder="none", max_lines=1,
                    info="thinking tokens; the next paragraph's end stops", min_width=220,
                )  # fmt: skip
            with gr.Row():
                temperature = gr.Slider(
                    0, 1.5, 0.6, step=0.1, label="Temperature", info="0: greedy", min_width=220
                )
                seed = gr.Textbox(
                    "0" if source.seeded else "", label="Seed", elem_id="seed", min_width=220,
                    info="one seed, one text up to the stop", max_lines=1,
                    placeholder="0" if source.seeded else "none: two samples",
                )  # fmt: skip
                tokens = gr.Slider(
                    64, most, min(2000, most * 3 // 4), step=1, label="Most tokens",
                    info="of thinking and answer together", min_width=220,
                )  # fmt: skip
        columns = gr.HTML(_empty(), elem_id="columns")

        def answer(
            text: str, mode: str, threshold: float, price: str, budget: str, temperature: float,
            seed: str, tokens: float,
        ) -> Iterator[Any]:  # fmt: skip
            try:
                asked = question_of(text, mode, threshold, price, budget, temperature, seed, tokens)
                yield from _shown(source, asked)
            except (ValueError, TypeError, OSError) as error:
                raise gr.Error(str(error), duration=None, title="This cannot be asked") from None

        knobs = [question, mode, threshold, price, budget, temperature, seed, tokens]
        running = gr.on(
            [ask.click, question.submit], answer, knobs, columns, show_progress="hidden",
            concurrency_limit=1, api_name="ask", js=_SHOW_COLUMNS,
        )  # fmt: skip
        stop.click(None, cancels=running)
        mode.change(
            lambda chosen: gr.update(visible=chosen == "threshold"), mode, threshold,
            show_progress="hidden", api_name=False,
        )  # fmt: skip
    return page


def question_of(
    text: str, mode: str, threshold: float, price: str, budget: str, temperature: float, seed: str,
    tokens: float,
) -> Question:  # fmt: skip
    """A question from the values of the page's fields; price, budget and seed may be empty.

    Raises:
        ValueError: It is empty or far too long, or a field holds no number; says what to do.
    """
    if not text.strip():
        raise ValueError("The question is empty: write one, or take an example.")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"The question has {len(text):,} characters; {_MOST_CHARACTERS:,} are allowed: "
            "shorten it."
        )
    settings: dict[str, Any] = {"mode": mode}
    if mode == "threshold":
        settings["threshold"] = threshold
    if price.strip():
        settings["price"] = _number("Price λ", price, float, "1e-4")
    if budget.strip():
        settings["max_thinking_tokens"] = _number("Budget", budget, int, "200")
    drawn = _number("Seed", seed, int, "0") if seed.strip() else None
    return Question(text.strip(), settings, temperature, drawn, int(tokens))


def _number(field: str, text: str, kind: type[_Number], example: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise ValueError(
            f"{field} is “{text}”, and no {what}: write one, such as {example}, or nothing."
        ) from None


def _shown(source: Source, question: Question) -> Iterator[str]:
    """The page's HTML, again and again, where it has changed."""
    last = ""
    texts = source.ask(question)
    try:
        for plain, pruned in texts:
            shown = columns_html(plain, pruned, source.seconds_note)
            if shown != last:
                last = shown
                yield shown
    finally:
        close = getattr(texts, "close", None)
        if close is not None:
            close()


def _empty() -> str:
    return columns_html(Column(), Column())


@contextmanager
def running_app(source: Source, host: str | None = None, port: int | None = None,
                in_browser: bool = False) -> Iterator[str]:  # fmt: skip
    """Serves the page from a thread of this process, until the context ends.

    Args:
        source: What it asks.
        host: Address to listen at; None: Gradio's GRADIO_SERVER_NAME, else 127.0.0.1.
        port: None: Gradio's GRADIO_SERVER_PORT, else the first free one from 7860.
        in_browser: Open a browser, too.

    Yields:
        The page's address.

    Raises:
        MissingPackageError: Gradio is not installed.
        OSError: The port is taken.
    """
    page = build_page(source)
    gr: Any = needed("gradio", "the page of `ospruner app`", PIP_LINE)
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    _, address, _ = page.queue(max_size=64).launch(
        server_name=host, server_port=port, inbrowser=in_browser, share=False, ssr_mode=False,
        footer_links=[], css_paths=_CSS, theme=gr.themes.Default(**fonts), show_error=True,
        prevent_thread_lock=True, quiet=True,
    )  # fmt: skip
    try:
        yield str(address)
    finally:
        page.close()


def open_app(
    source: Source, host: str | None = None, port: int | None = None, in_browser: bool = False
) -> None:
    """Serves the page until it is interrupted; see `running_app`."""
    with running_app(source, host, port, in_browser) as address:
        print(f"OS-Pruner's page: {address} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()

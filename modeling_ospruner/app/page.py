"""The page of `ospruner app`, in Gradio: question, knobs, examples, two columns.

It asks nobody but its own server: no analytics, no fonts and no scripts from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modeling_ospruner.common.optional import needed
from modeling_ospruner.modeling_ospruner import OSPrunerForCausalLM

from .columns import Column, Question, Source, columns_html
from .turns import LocalSource

__all__ = ["EXAMPLES", "PIP_LINE", "build_page", "open_app", "open_source"]

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
    hub = {"revision": revision} if revision else {}
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
        with gr.Accordion("Knobs", open=False, elem_id="knobs"), gr.Row():
            mode = gr.Radio(
                [("draw (sample)", "sample"), ("threshold", "threshold")], value=source.mode,
                label="How the policy stops",
                info="Draw: with its probability. Threshold: where that is reached.",
            )  # fmt: skip
            threshold = gr.Slider(
                0, 1, source.threshold, step=0.01, label="Threshold", elem_id="threshold",
                visible=source.mode == "threshold",
            )  # fmt: skip
            low, high = source.prices or (0.0, 1.0)
            price = gr.Number(
                None, label="Length penalty λ", visible=source.prices is not None, elem_id="price",
                info=f"Price of a thinking token, {low:g} to {high:g}; empty: the policy's own.",
            )  # fmt: skip
            budget = gr.Number(
                0, label="Budget", precision=0, minimum=0, elem_id="budget",
                info="Stop at the first paragraph's end with so many thinking tokens; 0: none.",
            )  # fmt: skip
            temperature = gr.Slider(0, 1.5, 0.6, step=0.1, label="Temperature", info="0: greedy")
            seed = gr.Number(
                0 if source.seeded else None, label="Seed", precision=0, elem_id="seed",
                info="The same seed gives the same text up to the stop."
                + "" if source.seeded else " Empty: the server's own, two samples.",
            )  # fmt: skip
            tokens = gr.Slider(
                64, most, min(2000, most * 3 // 4), step=1, label="Most tokens",
                info="Of thinking and answer together",
            )  # fmt: skip
        columns = gr.HTML(_empty(), elem_id="columns")

        def answer(
            text: str, mode: str, threshold: float, price: float | None, budget: float | None,
            temperature: float, seed: float | None, tokens: float,
        ) -> Iterator[Any]:  # fmt: skip
            try:
                asked = question_of(
                    text, mode, threshold, price if source.prices else None, budget, temperature,
                    seed, tokens,
                )  # fmt: skip
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
    text: str, mode: str, threshold: float, price: float | None, budget: float | None,
    temperature: float, seed: float | None, tokens: float,
) -> Question:  # fmt: skip
    """A question from the values of the page's fields.

    Raises:
        ValueError: It is empty or far too long, or a field is; says what to do.
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
    if price is not None:
        settings["length_penalty"] = price
    if budget:
        settings["max_thinking_tokens"] = int(budget)
    whole = None if seed is None else int(seed)
    return Question(text.strip(), settings, temperature, whole, int(tokens))


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


def open_app(
    source: Source, host: str | None = None, port: int | None = None, in_browser: bool = False
) -> None:
    """Opens the page and serves it until it is interrupted.

    Args:
        source: What it asks.
        host: Address to listen at; None: Gradio's GRADIO_SERVER_NAME, else 127.0.0.1.
        port: None: Gradio's GRADIO_SERVER_PORT, else the first free one from 7860.
        in_browser: Open a browser, too.

    Raises:
        MissingPackageError: Gradio is not installed.
        OSError: The port is taken.
    """
    page = build_page(source)
    gr: Any = needed("gradio", "the page of `ospruner app`", PIP_LINE)
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    page.queue(max_size=64).launch(
        server_name=host, server_port=port, inbrowser=in_browser, share=False, ssr_mode=False,
        footer_links=[], css_paths=_CSS, theme=gr.themes.Default(**fonts), show_error=True,
    )  # fmt: skip

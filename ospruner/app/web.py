"""The page of `ospruner app`, in Gradio: question, knobs, examples, two columns.

It asks nobody but its own server: no analytics, no fonts and no scripts from elsewhere.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.optional import needed
from ospruner.provenance import check_policy_place

from .columns import AppColumn, LocalSource, Question, ServedSource, Source, columns_html

# Problems that the embedded reasoner understands, too.
EXAMPLES = (
    "Solve 3x+54=102 for x.",
    "Tom has 45 cards. Tom buys 17. The total grows 3 times. Tom gives away 28. "
    "How many cards does Tom have?",
    "What is the remainder when 397 is divided by 23?",
    "Find x and y with x+y=17 and x*y=66. Give the larger number.",
    "Which is larger, 24*7 or 131+29? Give its value.",
)
_MOST_TOKENS = 4096
# On a narrow window the columns lie below the fold.
_SHOW_COLUMNS = """(...values) => {
  document.querySelector("#columns").scrollIntoView({behavior: "smooth", block: "start"});
  return values;
}"""


def open_source(policy: str | None, url: str | None = None, revision: str | None = None) -> Source:
    """What the page asks: a policy that is loaded into this process, or a server's address.

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
    if policy is None:
        return ServedSource(str(url))
    check_policy_place(policy)
    hub: dict[str, Any] = {"revision": revision} if revision else {}
    if torch.accelerator.is_available():  # transformers spreads the base over them
        hub["device_map"] = "auto"
    model = OSPrunerForCausalLM.from_pretrained(policy, dtype="auto", **hub)
    return LocalSource(model, Path(policy).name if Path(policy).is_dir() else policy)


def _gradio() -> Any:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported
    return needed("gradio", "the page of `ospruner app`", "pip install 'ospruner[app]'")


def build_page(source: Source) -> Any:
    """The page, as Gradio's `Blocks`; MissingPackageError without Gradio."""
    gr = _gradio()
    most = min(_MOST_TOKENS, source.positions or _MOST_TOKENS)
    with gr.Blocks(title="OS-Pruner", analytics_enabled=False) as page:
        gr.Markdown(
            f"# OS-Pruner\n\nThe same question twice: stopped by a policy at the right "
            f"paragraph, and the base as it is. `{source.policy}`"
        )
        with gr.Row(equal_height=True):
            question = gr.Textbox(
                label="Question",
                lines=3,
                max_lines=6,
                scale=5,
                autofocus=True,
                elem_id="question",
                placeholder="A problem with one answer, such as a number",
            )
            with gr.Column(scale=1, min_width=140):
                ask = gr.Button("Ask both", variant="primary", elem_id="ask")
                now = gr.Button("Answer now", elem_id="now")
                stop = gr.Button("Stop", elem_id="stop")
        gr.Examples([[one] for one in EXAMPLES], question, label="Examples", cache_examples=False)
        with gr.Accordion("Knobs", open=False, elem_id="knobs"), gr.Row():
            low, high = source.prices or (0.0, 1.0)
            price = gr.Number(
                None,
                label="Price",
                elem_id="price",
                visible=source.prices is not None,
                info=f"of a thinking token, {low:g} to {high:g}; empty: the policy's own",
            )
            budget = gr.Number(
                None,
                label="Budget",
                elem_id="budget",
                precision=0,
                info="thinking tokens; the next paragraph's end stops",
            )
            temperature = gr.Slider(0, 1.5, 0.6, step=0.1, label="Temperature", info="0: greedy")
            seed = gr.Number(0, label="Seed", precision=0, info="one seed, one text up to the stop")
            tokens = gr.Slider(
                64,
                most,
                min(2000, most * 3 // 4),
                step=1,
                label="Most tokens",
                info="of thinking and answer together",
            )
        columns = gr.HTML(columns_html(AppColumn(), AppColumn()), elem_id="columns")

        def answer(
            text: str | None,
            price: float | None,
            budget: int | None,
            temperature: float,
            seed: int | None,
            tokens: float,
        ) -> Iterator[Any]:
            given = {"price": price, "max_thinking_tokens": budget}
            settings = {name: value for name, value in given.items() if value is not None}
            try:
                asked = Question(
                    (text or "").strip(), settings, temperature, seed or 0, int(tokens)
                )
                yield from shown(source, asked)
            except (ValueError, TypeError, OSError) as error:
                raise gr.Error(str(error), duration=None, title="This cannot be asked") from None

        knobs = [question, price, budget, temperature, seed, tokens]
        running = gr.on(
            [ask.click, question.submit],
            answer,
            knobs,
            columns,
            show_progress="hidden",
            concurrency_limit=1,
            api_name="ask",
            js=_SHOW_COLUMNS,
        )
        now.click(source.answer_now, show_progress="hidden")
        stop.click(None, cancels=running)
    return page


def shown(source: Source, question: Question) -> Iterator[str]:
    """The page's HTML while first the pruned column grows, then the other."""
    plain = pruned = AppColumn()
    with closing(source.ask(question, pruned=True)) as texts:
        for pruned in texts:
            yield columns_html(plain, pruned)
    with closing(source.ask(question, pruned=False)) as texts:
        for plain in texts:
            yield columns_html(plain, pruned)


@contextmanager
def running_app(
    source: Source, host: str | None = None, port: int | None = None, in_browser: bool = False
) -> Iterator[str]:
    """Serves the page from a thread of this process, until the context ends; yields its address.

    It listens at Gradio's GRADIO_SERVER_NAME and GRADIO_SERVER_PORT, else at 127.0.0.1 and the
    first free port from 7860, where `host` and `port` do not say otherwise.

    Raises:
        MissingPackageError: Gradio is not installed.
        OSError: The port is taken.
    """
    page, gr = build_page(source), _gradio()
    fonts: Any = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    _, address, _ = page.queue(max_size=64).launch(
        server_name=host,
        server_port=port,
        inbrowser=in_browser,
        share=False,
        ssr_mode=False,
        footer_links=[],
        css_paths=Path(__file__).with_name("page.css"),
        show_error=True,
        theme=gr.themes.Default(**fonts),
        prevent_thread_lock=True,
        quiet=True,
    )
    try:
        yield str(address)
    finally:
        page.close()


def open_app(policy: str | None, url: str | None, revision: str | None, **where: Any) -> None:
    """Serves the page until it is interrupted; see `open_source` and `running_app`."""
    _gradio()  # before a policy is loaded
    source = open_source(policy, url, revision)
    with running_app(source, **where) as address:
        print(f"OS-Pruner's page: {address} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()

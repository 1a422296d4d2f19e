"""What `make docs` adds to the pages: the README as front page, and llms.txt.

Pages link to files of the repository, which are no part of the site: those links lead to the
repository's address where `repo_url` names one, and are plain text where nobody does.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
# GitHub takes a picture's dark version from <source>, the site by the end of its address.
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]+)">\s*</picture>'
)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
API = (
    ("Policies", "modeling_ospruner", ("OSPrunerForCausalLM", "OSPrunerConfig")),
    ("Stopping", "modeling_ospruner", ("StopPolicyConfig", "StopRecord")),
    ("Rules", "ospruner.rules.families", ("Family", "StopRule", "parse_rule")),
    ("Rules in generate", "ospruner.rules.live", ("generate_with_rule",)),
    ("Comparing", "ospruner.comparing", ("compare",)),
    ("Promises", "ospruner.calibrating", ("calibrate",)),
    ("All in one", "ospruner.rounds", ("make", "Made", "Round")),
    ("Formats", "modeling_ospruner", ("ReasoningFormat", "TokenFormat")),
    ("Engines", "ospruner.engines.opening", ("EngineOptions", "open_engine")),
    ("Labels", "ospruner.train.labels.label", ("LabelConfig", "label")),
    (
        "Training",
        "ospruner.train.trainer",
        ("StopConfig", "StopTrainer"),
    ),
    (
        "Replay",
        "ospruner.eval.replay",
        ("replay", "replay_budget", "replay_full", "hindsight_oracle"),
    ),
    ("Tables", "ospruner.eval.table", ("TraceTable",)),
)


def outside(text: str, page: str, repo_url: str = "") -> str:
    """A page's text with its pictures and its links to files outside of docs/ as on the site.

    Args:
        text: Markdown.
        page: Its path in the repository, such as docs/eval.md.
        repo_url: The repository's address, or "".
    """

    def changed(found: re.Match[str]) -> str:
        mark, shown, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        served = place.startswith("docs/") and place.endswith((".md", ".png", ".svg", ".ipynb"))
        if served or place == "README.md":
            inside = posixpath.relpath("docs/index.md" if place == "README.md" else place, "docs")
            return f"{mark}[{shown}]({inside}{'#' * bool(anchor)}{anchor})"
        return f"[{shown}]({repo_url.rstrip('/')}/blob/main/{place})" if repo_url else shown

    text = PICTURE.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", text)
    parts = CODE.split(text)
    return "".join(one if CODE.fullmatch(one) else LINK.sub(changed, one) for one in parts)


def api_page() -> str:
    """The API reference, from docstrings."""
    lines = ["# API", "", "What the README's examples use, from the docstrings."]
    for title, module, names in API:
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: {module}.{name}", "    options:", "      heading_level: 3"]
    return "\n".join([*lines, ""])


def llms_text() -> str:
    """llms.txt: what this is, and each page with its first sentence, in the order of the README."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    summary = " ".join(readme.split("\n\n")[1].split())
    lines = ["# OS-Pruner", "", f"> {summary}", "", "## Pages", ""]
    for name in dict.fromkeys(re.findall(r"\]\((docs/[\w-]+\.md)", readme)):
        text = (REPO / name).read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        prose = next(one for one in text.split("\n\n") if re.match(r"[A-Z`]", one))
        first = " ".join(LINK.sub(r"\2", prose).split())
        sentence = re.split(r"(?<=\.) (?=[A-Z])", first)[0].rstrip(":")
        lines.append(f"- [{title}]({name}): {sentence}")
    return "\n".join([*lines, ""])


def on_files(files: Any, config: Any) -> Any:
    """Adds the front page, the reference and llms.txt."""
    from mkdocs.structure.files import File

    front = (REPO / "README.md").read_text(encoding="utf-8")
    made = {"index.md": outside(front, "README.md", config.repo_url or ""), "api.md": api_page()}
    made["llms.txt"] = llms_text().replace("](docs/", "](").replace(".md)", "/)")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Changes the links that leave the site."""
    if page.file.src_uri in ("index.md", "api.md"):
        return markdown
    return outside(markdown, f"docs/{page.file.src_uri}", config.repo_url or "")


if __name__ == "__main__":
    (REPO / "llms.txt").write_text(llms_text(), encoding="utf-8")

"""Each file of a published policy changed, removed, or joined by another: named, one by one."""

import random
from pathlib import Path

import pytest

from modeling_ospruner import OSPrunerForCausalLM
from ospruner.hub_cards.verify import verify_folder

from ..conftest import Fuzzed
from .conftest import Publisher

NOT_VERIFIED = "README.md"  # the owner may edit the card on the Hub
RECORD = "provenance.json"  # holds the others' hashes: it cannot vouch for its own bytes
ADDED = ("extra.py", "modeling_extra_ospruner.py", "pytorch_model.bin", "weights/x.pkl", ".hidden")


@pytest.mark.parametrize("flips", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_each_file_that_was_tampered_with_is_named(
    flips: int, publisher: Publisher, policy_dir: Path, fuzzed: Fuzzed
) -> None:
    folder = publisher.stage(policy_dir, "org/tampered").path
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    drawn = random.Random(0)
    missed: list[str] = []
    cases = 0

    def look(name: str, what: str) -> None:
        nonlocal cases
        cases += 1
        try:
            bad = [check.detail for check in verify_folder(folder, refuse) if not check.ok]
        except ValueError as error:
            bad = [str(error)]
        if not any(Path(name).name in detail for detail in bad):
            missed.append(f"{name} {what}: {bad}")

    def refuse(path: Path) -> OSPrunerForCausalLM:
        """The weights are looked at by their hash here: loading takes seconds a case."""
        raise ValueError("not loaded")

    assert all(check.ok for check in verify_folder(folder, publisher.load))
    for name in names:
        if name == NOT_VERIFIED:
            continue
        file, content = folder / name, (folder / name).read_bytes()
        for _ in range(flips if name != RECORD else 0):
            at = drawn.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            file.write_bytes(flipped)
            look(name, f"bit {at} flipped")
        for what, other in (("emptied", b""), ("cut", content[:-1]), ("longer", content + b"\n")):
            if name != RECORD or what == "emptied":
                file.write_bytes(other)
                look(name, what)
        file.unlink()
        look(name, "removed")
        file.write_bytes(content)
    for name in ADDED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"import os\n")
        look(name, "added")
        (folder / name).unlink()
    assert all(check.ok for check in verify_folder(folder, publisher.load))
    fuzzed("published policy tampered with", cases=cases, named=cases - len(missed))
    assert not missed, "\n".join(missed)

"""One public class name has one meaning; kept by reading the sources, importing nothing."""

import ast
import collections
import pathlib

from sources import parsed

ROOT = pathlib.Path(__file__).parents[1] / "nca_trader"


def test_every_public_class_has_a_name_of_its_own():
    homes = collections.defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 300
    assert {name: at for name, at in homes.items() if len(at) > 1} == {}

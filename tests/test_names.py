"""One public class name has one meaning; kept by reading the sources, importing nothing."""

import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1] / "nca_trader"


def test_every_public_class_has_a_name_of_its_own():
    homes = collections.defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:]", path.read_text(), re.M):
            homes[name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 300
    assert {name: at for name, at in homes.items() if len(at) > 1} == {}

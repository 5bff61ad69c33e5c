"""`vllm-omni new-plugin NAME`: writes the folder of a plugin that installs, serves and passes its tests as it is.

The text of its files is in `templates/plugin`; `$name` and its like are filled in, nothing else is decided here.
"""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from string import Template

from vllm_omni import __version__
from vllm_omni.errors import SettingError

TEMPLATES = Path(__file__).parent / "templates/plugin"
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the model family, in small letters: my-model")
    parser.add_argument("--dir", default=".", metavar="DIR", help="where the folder NAME is made (default: here)")


def run(args: argparse.Namespace) -> int:
    """Writes DIR/NAME. Raises SettingError, before anything is written, if the name or the folder cannot be used."""
    words = _words(args.name)
    folder = Path(args.dir) / args.name
    if folder.exists():
        raise SettingError(f"{folder} exists already. Remove it, or choose another NAME or --dir.", param="dir")
    written = []
    for template in sorted(TEMPLATES.rglob("*.txt")):
        target = folder / template.relative_to(TEMPLATES).with_suffix("")
        target = target.with_name(target.name.replace("test_name", f"test_{words['name'].replace('-', '_')}"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
        written.append(str(target.relative_to(folder)))
    where = shlex.quote(str(folder))
    print(f"Wrote {folder}: {', '.join(written)}.\nNext:\n  pip install -e {where}'[test]'")
    print(f"  vllm-omni serve {args.name}\n  pytest {where}/tests")
    return 0


def _words(name: str) -> dict[str, str]:
    """What the templates are filled with. Raises SettingError for a name that is no plugin name, or taken."""
    if not NAME.fullmatch(name):
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        remedy = f" Try '{plain}'." if plain and NAME.fullmatch(plain) else ""
        raise SettingError(f"'{name}' is no plugin name: small letters, digits and single dashes, a letter first.{remedy}", param="name")
    module = f"vllm_omni_{name.replace('-', '_')}"
    if name.replace("_", "-").startswith("vllm-omni"):
        raise SettingError(f"Leave out the prefix 'vllm-omni': it is added to '{name}' by itself.", param="name")
    if find_spec(module) is not None:
        raise SettingError(f"A module {module} is installed already. Choose another name, or uninstall it first.", param="name")
    major, minor = map(int, __version__.split(".")[:2])
    supported = f">={major}.{minor},<{major}.{minor + 1}"
    return {"name": name, "module": module, "distribution": module.replace("_", "-"), "range": supported}

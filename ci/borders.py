"""The borders of the code, as rules over its files: who may import whom, what must not appear, how long things may get.

`ci/check` runs it; `tests/test_architecture.py` shows that each rule bites. A rule sees one file and yields its faults.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORE_BUDGET = 9_000
FILE_BUDGET = 400

LAYERS = (
    {"errors"},
    {"param", "payload"},
    {"request"},
    {"graph"},
    {"api", "deployment", "engine", "hookspecs", "platform", "plugin", "recipe", "sampling"},
    {"compat", "discovery", "doctor", "hub", "layers", "machine", "resolve", "samples", "settle"},
    {"connectors", "engines", "kit"},
    {"orchestrator", "process_replicas", "replicas"},
    {"omni"},
    {"serving", "testing"},
    {"cli"},
    {"__main__", "entrypoints"},
)
"""Modules of vllm_omni, left to right: nothing imports to its right."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
DECLARATIONS = {name for level in LAYERS[:5] for name in level}
LIGHT = DECLARATIONS | {"__init__", "cli", "discovery", "doctor", "entrypoints", "hub", "layers", "machine", "resolve", "settle"}

LIGHT_FILES = {"vllm_omni/compat/lines.py"}
"""In what is not light otherwise."""

LOADED, ALONE = "a plugin is loaded", "a request fails alone"
BROAD_EXCEPT = {
    "vllm_omni/connectors/sockets.py::SocketPost._deliver": ALONE,
    "vllm_omni/discovery.py::Found.use": LOADED,
    "vllm_omni/engines/ar.py::AREngine._work": ALONE,
    "vllm_omni/engines/attempt.py::attempt": ALONE,
    "vllm_omni/engines/host.py::merge.drain": ALONE,
    "vllm_omni/engines/load.py::load_object": LOADED,
    "vllm_omni/engines/host.py::start": LOADED,
    "vllm_omni/hookspecs.py::plugins": LOADED,
    "vllm_omni/serving/app.py::build": LOADED,
    "vllm_omni/serving/gate.py::Gate.__call__": ALONE,
}
"""Where `except Exception` stands (`file::function`), and why."""


class Fault(NamedTuple):
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class File:
    """A source file; `path` is relative to the checkout, `owner` the module of vllm_omni it belongs to ("" outside the core)."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        parts = Path(path).with_suffix("").parts
        self.owner = parts[1] if parts[0] == "vllm_omni" else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def fault(self, line: int, message: str) -> Fault:
        return Fault(self.path, line, message)

    def matches(self, pattern: str) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(self.source.splitlines(), 1):
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield number, match.group()


class Import(NamedTuple):
    line: int
    name: str
    at_start: bool


def imports(tree: ast.AST, at_start: bool = True) -> Iterator[Import]:
    """Every import as a full dotted name; `at_start` if it happens when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, at_start) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, f"{module}.{alias.name}", at_start) for alias in node.names)
        else:
            typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, at_start and not typing_only and not function)


def direction(file: File) -> Iterator[Fault]:
    """Nothing imports to its right."""
    if not file.owner or file.owner == "__init__":
        return
    if file.owner not in LEVEL:
        yield file.fault(1, f"vllm_omni.{file.owner} has no place in LAYERS of ci/borders.py")
        return
    for line, name, _ in imports(file.tree):
        parts = name.split(".")
        if name.startswith("."):
            yield file.fault(line, "relative import; write the full name")
        elif parts[0] == "vllm_omni" and len(parts) > 1 and LEVEL.get(parts[1], -1) > LEVEL[file.owner]:
            yield file.fault(line, f"{file.owner} imports {name}, which is to its right")
        elif parts[0] in ("vllm_omni_platforms", "vllm_omni_recipes") and LEVEL[file.owner] < LEVEL["settle"]:
            yield file.fault(line, f"{file.owner} imports {name}; declarations know no device and no recipe")


def light(file: File) -> Iterator[Fault]:
    """Declarations and whatever a command starts with load nothing heavy."""
    if file.owner not in LIGHT and file.path not in LIGHT_FILES:
        return
    never = {"diffusers", "numpy", "torch", "transformers", "vllm"}
    late = never | {"PIL", "av", "fastapi", "httptools", "msgspec", "pydantic", "starlette", "uvicorn", "uvloop", "zmq"}
    late |= {"huggingface_hub", "openai"}
    for line, name, at_start in imports(file.tree):
        top = name.split(".")[0]
        if top in (late if at_start else never if file.owner in DECLARATIONS else ()):
            yield file.fault(line, f"{file.owner} imports {top}" + (" when it is imported" if top not in never else ""))
        file_of = f"{name.rpartition('.')[0].replace('.', '/')}.py"
        heavy_owner = name.startswith("vllm_omni.") and name.split(".")[1] not in LIGHT and file_of not in LIGHT_FILES
        if at_start and heavy_owner and name.split(".")[1] in LEVEL and file.owner != "__init__":
            yield file.fault(line, f"{file.owner} imports {name} when it is imported; do so in the function that needs it")


def vllm_internals(file: File) -> Iterator[Fault]:
    """Only compat/ knows vLLM; kit/ may use its models and layers."""
    if file.owner in ("", "compat"):
        return
    allowed = ("vllm.model_executor",) if file.owner == "kit" else ()
    for line, name, _ in imports(file.tree):
        if name.split(".")[0] == "vllm" and not name.startswith(allowed or "\0"):
            yield file.fault(line, f"imports {name}; vLLM is reached through vllm_omni.compat")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"vllm(\.\w+)+(:\w+)?", node.value):
            yield file.fault(node.lineno, f"names '{node.value}'; vLLM is reached through vllm_omni.compat")


def family_names(file: File) -> Iterator[Fault]:
    """The core names no model."""
    families = "qwen|cosmos|kokoro|smollm|wan2|flux|bagel|cosyvoice|voxcpm|gr00t|hunyuan|echo|llama|mimo|whisper"
    for line, word in file.matches(rf"(?<![a-z])({families})"):
        yield file.fault(line, f"'{word}' names a model")


def device_names(file: File) -> Iterator[Fault]:
    """Shared code asks a Platform for a capability; only platforms/ names an accelerator."""
    devices = "ascend|cuda|hip|musa|npu|nvidia|rocm|xpu"
    for line, word in file.matches(rf"\bis_cpu\b|(?<![a-z])({devices})(?![a-z])") if file.owner else ():
        yield file.fault(line, f"'{word}' names a device; ask vllm_omni.platform for a capability")


def pickles(file: File) -> Iterator[Fault]:
    """Nothing is unpickled, wherever it came from."""
    banned = {"cloudpickle", "copyreg", "dill", "joblib", "marshal", "pickle", "shelve"}
    for line, name, _ in imports(file.tree):
        if name.split(".")[0] in banned or name in ("multiprocessing.connection", "multiprocessing.Pipe", "multiprocessing.Queue"):
            yield file.fault(line, f"imports {name}, which pickles")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
            yield file.fault(node.lineno, f"{node.attr} pickles")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield file.fault(node.value.lineno, "allow_pickle")


def patches(file: File) -> Iterator[Fault]:
    """Nothing that was imported is changed: no attribute of it is set or deleted, and no module replaced."""
    imported = {alias.asname or alias.name.split(".")[0] for node in ast.walk(file.tree) if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            text = ast.unparse(node)
            whole = isinstance(node, ast.Attribute) or ".__dict__" in text
            if text.startswith("sys.modules") or (whole and _root(node) in imported):
                yield file.fault(node.lineno, f"changes {text}, which was imported")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
            if not (ast.unparse(node.func) == "object.__setattr__" and ast.unparse(node.args[0]) == "self"):
                yield file.fault(node.lineno, f"{ast.unparse(node)[:80]}: set the attribute by name, on an object of ours")
        elif isinstance(node, ast.Call) and re.search(r"\bpatch(\.object|\.dict)?$", ast.unparse(node.func)):
            yield file.fault(node.lineno, f"{ast.unparse(node.func)} patches")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def length(file: File) -> Iterator[Fault]:
    """A file holds one noun."""
    lines = file.source.count("\n")
    if lines > FILE_BUDGET:
        yield file.fault(lines, f"{lines} lines; a file has at most {FILE_BUDGET}")


def docstring(file: File) -> Iterator[Fault]:
    """Every module with code says what it is."""
    if file.tree.body and not ast.get_docstring(file.tree):
        yield file.fault(1, "no module docstring")


def broad_except(file: File) -> Iterator[Fault]:
    """`except Exception` only where a plugin is loaded and where a request fails alone, as BROAD_EXCEPT lists."""
    for name, handler in handlers(file):
        broad = handler.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(handler.type))
        raised_on = ast.unparse(handler.body[-1]) == "raise"
        if broad and not raised_on and f"{file.path}::{name}" not in BROAD_EXCEPT:
            yield file.fault(handler.lineno, f"broad except in {name or 'the module'}; BROAD_EXCEPT of ci/borders.py has no reason for it")


def handlers(file: File) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every except clause, with the dotted name of the function it is in."""
    return _handlers(file.tree, "")


def _handlers(node: ast.AST, name: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield name, child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _handlers(child, f"{name}.{child.name}".lstrip(".") if named else name)  # type: ignore[attr-defined]


def reexports(file: File) -> Iterator[Fault]:
    """api.py re-exports declarations and does nothing else."""
    if file.path != "vllm_omni/api.py":
        return
    for node in file.tree.body[1:]:
        if not isinstance(node, ast.ImportFrom) and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            yield file.fault(node.lineno, "api.py only re-exports")


def plugin_imports(file: File) -> Iterator[Fault]:
    """A plugin sees vllm_omni.api and vllm_omni.kit; no other part of the core, no other plugin, no platform."""
    parts = Path(file.path).parts
    if parts[0] != "model_plugins" or "tests" in parts:
        return
    own = f"vllm_omni_{parts[1].replace('-', '_')}"
    for line, name, _ in imports(file.tree):
        top, *rest = name.split(".")
        if (top == "vllm_omni" and rest[:1] not in (["api"], ["kit"])) or (top.startswith("vllm_omni_") and top != own):
            yield file.fault(line, f"imports {name}; a plugin imports vllm_omni.api and vllm_omni.kit")


RULES: dict[str, Callable[[File], Iterator[Fault]]] = {
    rule.__name__: rule
    for rule in (
        direction, light, vllm_internals, family_names, device_names, pickles, patches, length, docstring, broad_except, reexports,
        plugin_imports,
    )
}  # fmt: skip
CORE_RULES = [rule for rule in RULES.values() if rule is not plugin_imports]
PLUGIN_RULES = [plugin_imports, pickles, patches, length, docstring]


def files(root: Path, *folders: str) -> list[File]:
    found = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [File(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in found if "templates" not in path.parts]


def code_lines(source: str) -> int:
    """Lines that are neither blank nor comment nor documentation."""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def faults(root: Path = ROOT) -> list[Fault]:
    core, plugins = files(root, "vllm_omni", "platforms", "recipes"), files(root, "model_plugins")
    found = [fault for file in core for rule in CORE_RULES for fault in rule(file)]
    found += [fault for file in plugins for rule in PLUGIN_RULES for fault in rule(file)]
    count = sum(code_lines(file.source) for file in core)
    print(f"core: {count} code lines in {len(core)} files, of at most {CORE_BUDGET}")
    if count > CORE_BUDGET:
        found.append(Fault("vllm_omni", 1, f"the core has {count} code lines, of at most {CORE_BUDGET}"))
    return found


if __name__ == "__main__":
    found = faults()
    print("\n".join(map(str, found)) or "borders: no fault")
    sys.exit(bool(found))

"""Imports point one way, light modules stay light, files and functions stay small."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Room -> layer. A room may import rooms of lower layers, and itself.
LAYERS = {
    "errors": 1, "types": 1, "sampling_params": 1, "config": 1, "plugins": 1, "spec_decode_metrics": 1, "vllm_words": 1, "version": 1,
    "json_object": 1, "structured_outputs": 1,
    "control": 2, "native": 2,
    "models": 3, "telemetry": 3,
    "drafters": 4,
    "engine": 5,
    "llm": 6, "server": 6, "bench": 6, "tune": 6, "train": 6, "simulate": 6, "vllm": 6,
    "audit": 7,   # over bench's HTTP client
    "cli": 8,   # a front room that may open the other front rooms' doors
}
# vLLM brings its own engine and models.
FORBIDDEN = {("vllm", "engine"), ("vllm", "models")}
# Names of the package itself that everyone may use: they import nothing.
ROOT_NAMES = {"__version__"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def short(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def dotted(path: Path) -> str:
    return ".".join(("headway", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def in_rooms(*rooms: str) -> list[Path]:
    return [path for path in FILES if room_of(path) in rooms]


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of every import of the file, those inside functions and under TYPE_CHECKING too."""
    package = ("headway", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package[: len(package) - node.level + 1], base]))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imported_modules(path):
        top, _, rest = name.partition(".")
        if top == "headway" and rest.partition(".")[0] not in ROOT_NAMES:
            yield rest.partition(".")[0] or "headway", line


def module_imports(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that the file imports: at its top, in functions, for types."""
    found = set()
    for name, _ in imported_modules(path):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", "headway", dotted(path)}


def test_no_import_circles() -> None:
    """Whoever reads a module has read what it imports. `import headway` itself loads what it names when it is first used."""
    modules = {dotted(path) for path in FILES}
    waiting = {dotted(path): module_imports(path, modules) for path in FILES if dotted(path) != "headway"}
    while free := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, "these import each other, or what does"


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(short(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


NOTHING_HEAVY = """
heavy = {"torch", "transformers", "fastapi", "uvicorn", "rich"} & set(sys.modules)
assert not heavy, heavy
"""


def test_every_room_has_a_layer() -> None:
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} <= LAYERS.keys()


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        pytest.skip("the public face may import every room")
    wrong = [
        f"{path.name}:{line} imports {other}"
        for other, line in imported_rooms(path)
        if other not in LAYERS
        or (room, other) in FORBIDDEN
        or (other != room and LAYERS[other] >= LAYERS[room] and LAYERS[room] > 1)
        or (LAYERS[room] == 1 and LAYERS[other] > 1)
    ]
    assert not wrong


def test_the_rule_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    file = tmp_path / "control" / "policies" / "example.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import headway.engine.engine\nfrom headway import models, __version__\nfrom ...drafters import ngram\nfrom . import static\n"
        "def late():\n    from headway.cli.main import main\n"
    )
    assert [room for room, _ in imported_rooms(file)] == ["engine", "models", "drafters", "control", "cli"]


@pytest.mark.parametrize("path", in_rooms(*(room for room, layer in LAYERS.items() if layer == 1)), ids=short)
def test_the_lowest_layer_is_standard_library(path: Path) -> None:
    tops = {name.partition(".")[0] for name, _ in imported_modules(path)}
    assert tops - {"headway"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", in_rooms("control"), ids=short)
def test_control_is_standard_library_and_numpy(path: Path) -> None:
    tops = {name.partition(".")[0] for name, _ in imported_modules(path)}
    assert tops - {"headway", "numpy"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "code",
    [
        "import headway",
        f"import {', '.join(map(dotted, in_rooms('control')))}",
        "import headway.drafters.ngram, headway.drafters.suffix",
        "from headway.config import SpeculativeConfig; SpeculativeConfig.parse('default').build_drafter()",
        "from headway.config import SpeculativeConfig; SpeculativeConfig.parse('ngram').build_policy()",
        "import headway.bench.workloads, headway.bench.client, headway.bench.http_load",
    ],
    ids=["headway", "control", "drafters", "build_drafter", "build_policy", "bench client"],
)
def test_light_imports_need_no_torch(code: str) -> None:
    done = run_python(f"import sys\n{code}\n{NOTHING_HEAVY}")
    assert done.returncode == 0, done.stderr


HELP = """
import sys
from headway.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
"""


@pytest.mark.parametrize(
    "words",
    [
        "", "serve", "generate", "chat", "bench", "bench throughput", "bench serve", "bench compare", "bench sweep", "tune", "replay",
        "audit", "top", "pull", "list", "vllm", "vllm config", "vllm check", "config",
    ],
)
def test_help_needs_no_torch(words: str) -> None:
    done = run_python(HELP + NOTHING_HEAVY, *words.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: headway {words}")


def assigned(node: ast.stmt) -> str | None:
    """The name a top-level statement gives a value to."""
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def test_files_are_small() -> None:
    lengths = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_functions_are_small() -> None:
    long = [
        f"{short(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


@pytest.mark.parametrize("path", [path for path, tree in TREES.items() if "__all__" in map(assigned, tree.body)], ids=short)
def test_public_names_are_sorted_and_there(path: Path) -> None:
    module = importlib.import_module(dotted(path))
    assert list(module.__all__) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert not missing


# -- a module writes its own attributes only ---------------------------------------------------------------------------

# What is made to be filled in by another module: the scheduler alone moves sequences on, the kernels' callers fill the kernels' arguments,
# and the rest belongs to libraries (argparse, ctypes, FastAPI, vLLM's requests and worker).
FILLED_IN = {
    "engine/scheduler.py": {"seq", "row"},
    "drafters/core/feature_native.py": {"args", "stack"},
    "models/attention_native.py": {"rotate", "attention"},
    "models/stack_native.py": {"args", "attention"},
    "native/ops.py": {"args"},
    "native/__init__.py": {"found", "self._dll.plan"},
    "models/gguf.py": {"tokenizer"},
    "cli/bench_sweep.py": {"args"},
    "cli/flags.py": {"args"},
    "cli/main.py": {"args", "command"},
    "cli/tune.py": {"args"},
    "server/app.py": {"http.state"},
    "server/openapi.py": {"app"},
    "vllm/adapter.py": {"request", "output"},
    "vllm/resolve.py": {"args", "parser"},
    "vllm/runner.py": {"prepare_and_lighten", "runner", "WorkerWrapperBase"},
}


def foreign_writes(tree: ast.Module, own: Collection[str]) -> Iterator[tuple[str, str]]:
    """(object, "line: code") of each `object.attribute = ...` but for self, cls, an object made in the same function, and attributes of the
    classes that the module itself defines (`own`)."""
    for function in [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        made = {"self", "cls"}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_class(node.value.func):
                made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and node.attr not in own
                and not (isinstance(node.value, ast.Name) and node.value.id in made)
            ):  # fmt: skip
                yield ast.unparse(node.value), f"{node.lineno}: {ast.unparse(node)}"


def own_attributes(tree: ast.Module) -> set[str]:
    """What the classes of this module declare or assign to self."""
    found = set()
    for node in [inner for outer in ast.walk(tree) if isinstance(outer, ast.ClassDef) for inner in ast.walk(outer)]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def is_class(function: ast.expr) -> bool:
    """Whether calling this makes an object, by its name: `Class(...)`, `module.Class(...)`, `cls(...)`."""
    name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    return name == "cls" or name.lstrip("_")[:1].isupper()


@pytest.mark.parametrize("path", FILES, ids=short)
def test_no_module_writes_attributes_of_other_objects(path: Path) -> None:
    own = set() if path in in_rooms("control") else own_attributes(TREES[path])   # the controller's parts write nothing but themselves
    allowed = FILLED_IN.get(short(path), set())
    assert not [code for written, code in foreign_writes(TREES[path], own) if written not in allowed]


def test_every_exception_is_needed() -> None:
    for name, allowed in FILLED_IN.items():
        tree = next(tree for path, tree in TREES.items() if short(path) == name)
        assert allowed == {written for written, _ in foreign_writes(tree, own_attributes(tree))} & allowed


def test_the_rule_sees_every_kind_of_write() -> None:
    tree = ast.parse(
        "def change(self, other):\n"
        "    self.a = 1\n    other.a = 1\n    other.a += 1\n    self.part.a = 1\n    other.a, b = 1, 2\n    del other.a\n"
        "    mine = Thing()\n    mine.a = 1\n    found = look_up()\n    found.a: int = 1\n    other.b = 1\n"
        "class Other:\n    b: int\n"
    )
    assert sorted(int(code.partition(":")[0]) for _, code in foreign_writes(tree, own_attributes(tree))) == [3, 4, 5, 6, 7, 11]

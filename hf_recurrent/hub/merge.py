"""Definitions of a package, with all that they need of it, merged into the text of one module.

The sources are cut and joined, comments and formatting included; only names change that would otherwise clash, or
that were attributes of a module. What cannot be merged raises.
"""

import ast
import builtins
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LINE_LENGTH = 120


@dataclass(frozen=True)
class Definition:
    """A top-level statement of a package's module that binds `name`."""

    module: str
    name: str


@dataclass(frozen=True)
class External:
    """`name` of a module outside the package, or the module itself where that is None; it is called `alias`."""

    module: str
    name: str | None
    alias: str


@dataclass
class Module:
    """A parsed module: its statements and imports by the names that they bind."""

    name: str
    text: str
    statements: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # alias: (module, name in it)


class Merger:
    """
    Args:
        package: the package's name; its modules are read from their files, not run.
        replaced: packages or modules of it, by name, and the modules that others get their names from instead.
        omitted: (class, method) names that are cut out.
    """

    def __init__(self, package: str, replaced: dict[str, str], omitted: Iterable[tuple[str, str]] = ()):
        self.package, self.replaced, self.omitted = package, replaced, set(omitted)
        self.modules: dict[str, Module] = {}
        self.needed: dict[str, dict[str, None]] = {}  # names by module, the modules after those that they need
        self.references: dict[Definition, list[tuple[ast.AST, Definition | External]]] = {}
        self.by_attribute: set[Definition] = set()
        self.cuts: dict[int, list[ast.stmt]] = {}  # the methods that are cut out, by the class's id()

    def merge(self, roots: Iterable[tuple[str, str]], docstring: str) -> str:
        """
        Args:
            roots: (module, name) of what is wanted.

        Returns:
            The source of a module that defines them.

        Raises:
            ValueError: a name cannot be found, or two imported ones clash.
        """
        for module, name in roots:
            self._require(self._resolve(module, name, module))
        names, parts = self._names(), []
        for module in self._in_order():
            parts.append(f"# ---- {module} ".ljust(LINE_LENGTH, "-"))
            parts += [self._text(module, statement, names) for statement in self._statements(module)]
        externals = {target for refs in self.references.values() for _, target in refs if isinstance(target, External)}
        return f'"""{docstring}"""\n\n{_import_lines(externals)}\n\n\n' + "\n\n\n".join(parts) + "\n"

    # ---- what is needed

    def _module(self, name: str) -> Module:
        if name not in self.modules:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise ValueError(f"there is no module {name}")
            text = Path(spec.origin).read_text(encoding="utf-8")
            module = self.modules[name] = Module(name, text)
            parent = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
            for statement in ast.parse(text).body:
                for alias, target in _imported(statement, parent):
                    module.imports[alias] = target
                for bound in _bound(statement):
                    module.statements[bound] = statement
        return self.modules[name]

    def _resolve(self, module: str, name: str, user: str) -> Definition | External | str | None:
        """What `name` means in `module`: a definition, a name or module from outside, a module of the package (its
        name), or None where it is none of the module's (a builtin)."""
        for old, new in self.replaced.items():
            if _within(module, old) and not _within(user, old):
                module = new
        source = self._module(module)
        if name in source.statements:
            return Definition(module, name)
        if name not in source.imports:
            return None
        origin, original = source.imports[name]
        if not _within(origin, self.package):
            return External(origin, original, name)
        if original is None:
            return origin
        if original not in self._module(origin).statements | self._module(origin).imports:
            if importlib.util.find_spec(origin).submodule_search_locations:  # a package, of which this is a module
                return f"{origin}.{original}"
        target = self._resolve(origin, original, module)
        if target is None:
            raise ValueError(f"{user} takes {original} from {origin}, which has no such name for an exported model")
        return target

    def _require(self, definition: Definition) -> None:
        """Note a definition, and whatever it refers to."""
        if definition in self.references:
            return
        references = self.references[definition] = []
        self.needed.setdefault(definition.module, {})[definition.name] = None
        module = self._module(definition.module)
        statement = self._kept(module.statements[definition.name])
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for origin, _ in dict(_imported(node, self.package)).values():
                    if _within(origin, self.package):
                        raise ValueError(f"{definition.module}.{definition.name} imports {origin} while it runs")
        for node in _read(statement, []):
            name = node.value.id if isinstance(node, ast.Attribute) else node.id
            target = self._resolve(definition.module, name, definition.module)
            if isinstance(target, str):  # a module of the package: what is meant is an attribute of it
                if not isinstance(node, ast.Attribute):
                    raise ValueError(f"{definition.module}.{definition.name} uses the module {target} as a value")
                target = self._resolve(target, node.attr, definition.module)
                if not isinstance(target, Definition):
                    raise ValueError(f"{definition.module}.{definition.name}: no definition of {ast.unparse(node)}")
                self.by_attribute.add(target)
                references.append((node, target))
            elif target is not None:
                references.append((node.value if isinstance(node, ast.Attribute) else node, target))
            elif not hasattr(builtins, name) and name not in ("__name__", "__file__"):
                raise ValueError(
                    f"{definition.module}.{definition.name}: {name} is bound in a way that is not understood"
                )
        for name in _bound(statement):
            self._require(Definition(definition.module, name))
        for _, target in references:
            if isinstance(target, Definition):
                self._require(target)

    def _kept(self, statement: ast.stmt) -> ast.stmt:
        """The statement without its omitted methods."""
        if isinstance(statement, ast.ClassDef):
            cut = [n for n in statement.body if (statement.name, getattr(n, "name", None)) in self.omitted]
            self.cuts.setdefault(id(statement), cut)
            statement.body = [node for node in statement.body if node not in cut]
        return statement

    def _in_order(self) -> list[str]:
        """Every needed module after those that its definitions refer to."""
        order: list[str] = []

        def visit(module: str) -> None:
            if module in order or module in visiting:
                return
            visiting.add(module)
            for definition, references in self.references.items():
                if definition.module == module:
                    for _, target in references:
                        if isinstance(target, Definition):
                            visit(target.module)
            order.append(module)

        visiting: set[str] = set()
        for module in list(self.needed):
            visit(module)
        return order

    def _statements(self, module: str) -> list[ast.stmt]:
        statements = self._module(module).statements
        needed = {statements[name].lineno: statements[name] for name in self.needed[module]}
        return [needed[line] for line in sorted(needed)]

    # ---- names and text

    def _names(self) -> dict[Definition | External, str]:
        """What everything is called in the merged module."""
        names: dict[Definition | External, str] = {}
        taken: dict[str, External | Definition] = {}
        externals = {t for references in self.references.values() for _, t in references if isinstance(t, External)}
        for target in sorted(externals, key=lambda target: (target.alias, target.module)):
            if target.alias in taken:
                raise ValueError(f"{target.alias} is imported from {taken[target.alias].module} and {target.module}")
            names[target] = target.alias
            taken[target.alias] = target
        for definition in self.references:
            name = definition.name
            if definition in self.by_attribute or name in taken:
                name = f"{definition.module.rpartition('.')[2]}_{name.lstrip('_')}"
            if name in taken:
                raise ValueError(f"{name} is defined in {taken[name].module} and {definition.module}")
            names[definition] = name
            taken[name] = definition
        return names

    def _text(self, module: str, statement: ast.stmt, names: dict[Definition | External, str]) -> str:
        """A statement's source, with the comments above it, under its names in the merged module."""
        source = self._module(module).text.encode()
        lines = source.splitlines(keepends=True)
        starts = [0, *itertools.accumulate(map(len, lines))]

        def span(node: ast.AST) -> tuple[int, int]:
            return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

        edits: dict[tuple[int, int], str] = {}
        for bound in _bound(statement):
            definition = Definition(module, bound)
            for node, target in self.references[definition]:
                if (old := ast.unparse(node)) != names[target]:
                    start, stop = edit = span(node)
                    if source[start:stop].decode() != old:  # before Python 3.12 nodes in f-strings have no true place
                        raise ValueError(f"{module}.{bound}: {old} stands where it cannot be renamed")
                    edits[edit] = names[target]
            if names[definition] != bound:
                edit = re.compile(rb"\b%s\b" % bound.encode()).search(source, span(statement)[0]).span()
                edits[edit] = names[definition]
        for method in self.cuts.get(id(statement), []):
            first = min([method.lineno, *(node.lineno for node in method.decorator_list)]) - 1
            while not lines[first - 1].strip():
                first -= 1
            edits[starts[first], starts[method.end_lineno]] = ""

        first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))]) - 1
        while first and lines[first - 1].startswith(b"#") and not lines[first - 1].startswith(b"# ----"):
            first -= 1
        end = span(statement)[1]
        end += len(lines[statement.end_lineno - 1].rstrip()) - statement.end_col_offset  # a comment behind it
        pieces, place = [], starts[first]
        for (start, stop), new in sorted(edits.items()):
            pieces += [source[place:start].decode(), new]
            place = stop
        return "".join([*pieces, source[place:end].decode()]).rstrip()


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _imported(statement: ast.stmt, parent: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """alias, (module, name) of an import; the name is None where the module itself is bound."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".")[0], (alias.name, None)
    elif isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        if statement.level:
            base = parent.split(".")[: len(parent.split(".")) - statement.level + 1]
            module = ".".join([*base, *filter(None, [module])])
        for alias in statement.names:
            yield alias.asname or alias.name, (module, alias.name)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level definition or assignment binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    yield node.id


def _locals(function: ast.AST) -> set[str]:
    """The names that belong to a function (or a comprehension): its arguments and what is bound in it."""
    found = set()
    if isinstance(function, FUNCTIONS):
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        found |= {argument.arg for argument in every if argument is not None}
        body = function.body if isinstance(function.body, list) else [function.body]
    else:
        body = [generator.target for generator in function.generators]
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif not isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            waiting += ast.iter_child_nodes(node)
    return found


def _read(node: ast.AST, scopes: list[set[str]]) -> Iterator[ast.Name | ast.Attribute]:
    """The names that a statement reads from its module: each as the attribute that is read of it, or alone.

    Args:
        scopes: the names of the functions around the node. A class body sees its own from where they are bound.
    """
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if not any(node.value.id in scope for scope in scopes):
            yield node
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and not any(node.id in scope for scope in scopes):
            yield node
    elif isinstance(node, FUNCTIONS):
        outside = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, *filter(None, [node.returns])]
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            outside += [argument.annotation for argument in every if argument is not None and argument.annotation]
        for child in outside:
            yield from _read(child, scopes)
        inner = [*(scope for scope in scopes if not isinstance(scope, ClassScope)), _locals(node)]
        for child in node.body if isinstance(node.body, list) else [node.body]:
            yield from _read(child, inner)
    elif isinstance(node, COMPREHENSIONS):
        inner = [*scopes, _locals(node)]
        for child in ast.iter_child_nodes(node):
            yield from _read(child, inner)
    elif isinstance(node, ast.ClassDef):
        for child in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            yield from _read(child, scopes)
        own = ClassScope()
        for child in node.body:
            yield from _read(child, [*scopes, own])
            own |= set(_bound(child))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _read(child, scopes)


class ClassScope(set):
    """The names that a class body has bound so far; functions in it do not see them."""


def _import_lines(externals: set[External]) -> str:
    """Import statements, sorted: the standard library, then the rest."""
    blocks: list[list[str]] = [[], []]
    plain = sorted({(target.module, target.alias) for target in externals if target.name is None})
    for module, alias in plain:
        line = f"import {module}" if module.split(".")[0] == alias else f"import {module} as {alias}"
        blocks[module.split(".")[0] not in sys.stdlib_module_names].append(line)
    grouped: dict[str, set[str]] = {}
    for target in externals:
        if target.name is not None:
            name = target.name if target.name == target.alias else f"{target.name} as {target.alias}"
            grouped.setdefault(target.module, set()).add(name)
    for module in sorted(grouped):
        line = f"from {module} import {', '.join(sorted(grouped[module]))}"
        if len(line) > LINE_LENGTH:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(grouped[module])) + ")"
        blocks[module.split(".")[0] not in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)

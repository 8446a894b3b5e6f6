"""Units: the modules that stage 3 gathers before their forward and releases after it, chosen from the module tree.

Note: how units are chosen. The tree is walked from the root, which is always a unit.

  a. A module named by the user, by class or by name, is a unit, whole: nothing below it is another.
     Without such names the classes that a Hugging Face model does not let split (`_no_split_modules`) take their place.
     So is a module marked as a leaf (utils.set_z3_leaf_modules).
  b. A member of a ModuleList, ModuleDict or Sequential that is large enough is a unit: a block of the model. What is in
     it belongs to it, but for members of lists in it that are themselves large and made of modules (the blocks of a
     stage, the experts of a layer); a Sequential of plain layers in a block stays part of the block.
  c. Outside of blocks, the largest modules without blocks in them that are large enough: embeddings, output layers.

A list without a forward is no unit, since nothing calls it. Nor is a parametrization, which runs inside its module.

Note: whose a parameter is. All modules that hold a parameter must find it gathered, so it belongs to the nearest unit
that encloses all of them, on every path from the root: the block for a weight of its own, the root for embeddings tied
to the output layer. A module registered at two places encloses its parameters at both.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from zerocore.errors import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_COMPILED = "_orig_mod"  # what torch.compile's wrapper calls the module in it

leaves: WeakSet[nn.Module] = WeakSet()  # modules that users have marked

_Chain = tuple[nn.Module, ...]  # from the root to a module, both included


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is gathered and released as one.

    Attributes:
        name: the module's name in the model; "" for the root.
        module: whose forward needs the parameters.
        params: the parameters that belong to it and to no unit below, in order of registration.
        parent: the index of the unit that encloses it; None for the root.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    parent: int | None


def choose_units(
    model: nn.Module,
    *,
    min_numel: int,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    external: Mapping[nn.Module, Collection[nn.Parameter]] | None = None,
) -> list[Unit]:
    """The units of a model, in order of registration, the root first. Deterministic; changes nothing.

    Args:
        min_numel: elements from which on a module may be a unit without being named.
        classes: classes of modules that are units, plain (`Block`) or with their module (`models.gpt.Block`).
        names: names of modules that are units, exact or as patterns of fnmatch (`encoder.layers.*`).
        external: parameters that a module uses without holding them. What is not of this model is left aside.

    Returns:
        The root and every unit that has parameters. Each parameter of the model stands in exactly one.

    Raises:
        ConfigError: a class or name that no module, or only a list without a forward, goes by.
    """
    paths = list(_paths(model, "", ()))
    names_of: dict[nn.Module, list[str]] = {}
    chains_of: dict[nn.Module, list[_Chain]] = {}
    for name, chain in paths:
        names_of.setdefault(chain[-1], []).append(name)
        chains_of.setdefault(chain[-1], []).append(chain)

    named = _by_class(classes, names_of) | _by_name(names, names_of)
    if not classes and not names:
        named = _not_to_be_split(names_of)
    named |= {module for module in names_of if module in leaves}
    chosen = {model} if model in named else {model} | _Choice(named, min_numel).below(model)
    return _units(model, chosen, names_of, chains_of, external or {})


class _Choice:
    """The rules a, b and c of this file's first note."""

    def __init__(self, named: set[nn.Module], min_numel: int) -> None:
        self._named = named
        self._min_numel = min_numel
        self._chosen: set[nn.Module] = set()

    def below(self, model: nn.Module) -> set[nn.Module]:
        self._walk(model, in_block=False, wrapper=True)
        return self._chosen

    def _walk(self, module: nn.Module, *, in_block: bool, wrapper: bool) -> None:
        """wrapper: the module is the root, or all that the root holds, in which case it stands for the root."""
        children = _children(module)
        wrapper = wrapper and len(children) == 1 and not any(True for _ in module.parameters(recurse=False))
        for child in children:
            if child in self._named:
                self._chosen.add(child)
            elif self._is_block(child, module) and not (in_block and _is_layer(child)):
                self._chosen.add(child)
                self._walk(child, in_block=True, wrapper=False)
            elif not in_block and not wrapper and self._is_large(child) and not self._has_units(child):
                self._chosen.add(child)
            else:
                self._walk(child, in_block=in_block, wrapper=wrapper)

    def _is_block(self, module: nn.Module, holder: nn.Module) -> bool:
        return isinstance(holder, _LISTS) and not isinstance(holder, ParametrizationList) and self._is_large(module)

    def _is_large(self, module: nn.Module) -> bool:
        return has_forward(module) and sum(p.numel() for p in module.parameters()) >= self._min_numel

    def _has_units(self, module: nn.Module) -> bool:
        return any(
            child in self._named or self._is_block(child, holder)
            for holder in module.modules()
            for child in _children(holder)
        )


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module runs something of its own: false for a ModuleList."""
    forward = getattr(module, "forward", None)
    defined = forward is not None and getattr(forward, "__func__", forward) is not nn.Module.forward
    return defined and not isinstance(module, ParametrizationList)


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def original(module: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped; any other itself."""
    inner = module._modules.get(_COMPILED)
    return module if inner is None else inner


def _is_layer(module: nn.Module) -> bool:
    return not _children(original(module))


def _paths(module: nn.Module, name: str, above: _Chain) -> Iterator[tuple[str, _Chain]]:
    """Every way from the root to a module, in order of registration."""
    chain = (*above, module)
    yield name, chain
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{name}.{child_name}" if name else child_name, chain)


def _units(
    model: nn.Module,
    chosen: set[nn.Module],
    names_of: Mapping[nn.Module, list[str]],
    chains_of: Mapping[nn.Module, list[_Chain]],
    external: Mapping[nn.Module, Collection[nn.Parameter]],
) -> list[Unit]:
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in names_of:
        for param in module.parameters(recurse=False):
            users.setdefault(param, []).append(module)
    for module, params in external.items():
        for param in params:
            if module in names_of and param in users:
                users[param].append(module)

    params_of: dict[nn.Module, list[nn.Parameter]] = {}
    for param, modules in users.items():
        params_of.setdefault(_enclosing(chosen, [c for m in modules for c in chains_of[m]]), []).append(param)

    kept = [module for module in names_of if module is model or module in params_of]
    index_of = {module: index for index, module in enumerate(kept)}
    owners = set(kept)

    def parent(module: nn.Module) -> int | None:
        above = [chain[:-1] for chain in chains_of[module]]
        return None if module is model else index_of[_enclosing(owners, above)]

    return [Unit(names_of[module][0], module, params_of.get(module, []), parent(module)) for module in kept]


def _enclosing(units: set[nn.Module], chains: Sequence[_Chain]) -> nn.Module:
    """The nearest of `units` that lies on all chains; the root lies on all."""
    shared = units.intersection(*chains)
    return next(module for module in reversed(chains[0]) if module in shared)


def class_names(module: nn.Module) -> set[str]:
    """What a module's class is called, plain and with its module."""
    cls = type(original(module))
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}


def _plain_name(name: str) -> str:
    """The name as it was before torch.compile wrapped modules on the way."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _by_class(classes: Iterable[str], names_of: Mapping[nn.Module, list[str]]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for wanted in classes:
        matches = [module for module in names_of if wanted in class_names(module)]
        known = dict.fromkeys(type(original(module)).__name__ for module in names_of if has_forward(module))
        found |= _with_forward(f"unit_classes: got {wanted!r}", "the class", wanted, matches, known)
    return found


def _by_name(names: Iterable[str], names_of: Mapping[nn.Module, list[str]]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for wanted in names:
        matches = [
            module
            for module, each in names_of.items()
            if any(wanted in (name, _plain_name(name)) or _matches(_plain_name(name), wanted) for name in each)
        ]
        known = dict.fromkeys(
            _plain_name(each[0]) for module, each in names_of.items() if each[0] and has_forward(module)
        )
        found |= _with_forward(f"unit_names: got {wanted!r}", "the name", wanted, matches, known)
    return found


def _matches(name: str, pattern: str) -> bool:
    return name != "" and fnmatch.fnmatchcase(name, pattern)


def _with_forward(
    got: str, what: str, wanted: str, matches: Sequence[nn.Module], known: Mapping[str, object]
) -> set[nn.Module]:
    """Those of `matches` that are called.

    Raises:
        ConfigError: there is none.
    """
    called = {module for module in matches if has_forward(module)}
    if called:
        return called
    if matches:
        raise ConfigError(
            f"[zero] {got}, which is a {type(matches[0]).__name__} without a forward, expected {what} of a module that "
            "is called. Name its members."
        )
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or list(known)[:3]
    raise ConfigError(
        f"[zero] {got}, which is in no module of the model, expected {what} of one, such as {', '.join(near) or '-'}. "
        "Correct or remove it."
    )


def _not_to_be_split(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Modules of the classes that Hugging Face models in the tree list as `_no_split_modules`."""
    classes: set[str] = set()
    every = list(modules)
    for module in every:
        listed = getattr(original(module), "_no_split_modules", None)
        if isinstance(listed, (list, tuple, set, frozenset)):
            classes.update(name for name in listed if isinstance(name, str))
    return {module for module in every if has_forward(module) and not classes.isdisjoint(class_names(module))}

"""Looking up the models and adapters of a server by name."""

from collections.abc import Collection

from attrs import define, field

from trio_pool_serve.config import ANY_NAME
from trio_pool_serve.errors import NotFoundError
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.serving.served_model import ServedModel


@define(eq=False)
class NamedModels:
    """The models of a server, by name."""

    by_name: dict[str, ServedModel] = field(init=False, factory=dict)
    """First in the order of the settings, then in the order of loading. The first one is the default."""

    def among(self, names: Collection[str] | None) -> list[ServedModel]:
        """Return the models in order; if ``names`` is given, only models with a name or alias in it."""
        models = [*self.by_name.values()]  # a copy: threads look up models, too
        return [served for served in models if names is None or any(name in names for name in served.source.names)]

    def adapters_among(self, names: Collection[str] | None) -> list[tuple[ServedModel, ServedAdapter]]:
        """Return the adapters with their models in order; if ``names`` is given, only adapters with a name in it."""
        of_models = [(served, adapter) for served in self.among(None) for adapter in [*served.adapters.values()]]
        return [each for each in of_models if names is None or each[1].name in names]

    def named(self, name: str) -> ServedModel | None:
        """Return the model with a name or alias, which may be ``ANY_NAME``, or with an adapter of that name."""
        return self.by_name.get(name) or next(
            (each for each in self.among(None) if name in each.source.aliases or name in each.adapters), None
        )

    def find(self, name: str | None = None, *, among: Collection[str] | None = None) -> ServedModel:
        """Return the model with a name or alias, or with an adapter of that name; without a name, the default.

        The default is the first model; if ``among`` has names of adapters only, that of the first adapter. A model that
        is being removed is the default only if there is no other. ``among`` limits the names, if given: a name of a
        model allows its other names too, but not its adapters. If a model has ``ANY_NAME``, it takes unknown names.
        Raises ``NotFoundError``.
        """
        return self.resolve(name, among=among)[0]

    def resolve(self, name: str | None, *, among: Collection[str] | None) -> tuple[ServedModel, str]:
        """Return the model as ``find``, and the name or alias of the model or adapter: ``name``, or the default's."""
        if name:
            served = self._allowed(name, among) or (None if self.named(name) else self._allowed(ANY_NAME, among))
        else:
            served, name = self._default(among)
        if served is None or name is None:
            adapters = [adapter.name for _, adapter in self.adapters_among(among)]
            known = ", ".join([*(model.source.name for model in self.among(among)), *adapters]) or "no model"
            message = f"The model `{name or 'default'}` does not exist. This server has: {known}."
            raise NotFoundError(message, model=name)
        return served, name

    def without_suffix(
        self, name: str | None, suffixes: Collection[str], *, among: Collection[str] | None
    ) -> tuple[str | None, str]:
        """Split a name into the name of a model and a suffix.

        The name stays as it is if it is known, or unknown without the suffix, too. ``among`` limits the names, if
        given.
        """
        suffix = next((each for each in suffixes if name.endswith(each)), "") if name else ""
        if not suffix or name is None or self._allowed(name, among):
            return name, ""
        stem = name.removesuffix(suffix)
        is_known = self._allowed(stem, among) or self._allowed(ANY_NAME, among)
        return (stem, suffix) if stem and is_known else (name, "")

    def _allowed(self, name: str, among: Collection[str] | None) -> ServedModel | None:
        """Return the model with a name, alias or adapter, if ``among`` allows that name."""
        served = self.named(name)
        if served is None or among is None:
            return served
        return served if (name in among if name in served.adapters else served in self.among(among)) else None

    def _default(self, among: Collection[str] | None) -> tuple[ServedModel, str] | tuple[None, None]:
        """Return the default model and its name, or the name of its adapter; ``None`` if there is none."""
        named = [(served, served.source.name) for served in self.among(among)] or [
            (served, adapter.name) for served, adapter in self.adapters_among(among)
        ]
        staying = [each for each in named if not each[0].is_leaving]
        return next(iter(staying or named), (None, None))

    def own_name(self, name: str | None, *, among: Collection[str] | None) -> str:
        """Return the name of the model or adapter that a name or alias stands for. Raises as ``find``."""
        served, name = self.resolve(name, among=among)
        return name if name in served.adapters else served.source.name

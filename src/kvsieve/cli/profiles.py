"""The calibration profile of a model, taken up by runs that ask for sparse attention."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.options import ModelOptions
from kvsieve.cli.sparse_options import ArmOptions, SparseOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm

if TYPE_CHECKING:
    from kvsieve.engine.llm import LLM

NONE = "none"
"""As the name of a profile: take none."""


def profiled(
    setting: SparseAttention | None, *, options: SparseOptions, llm: "LLM", model: ModelOptions
) -> SparseAttention | None:
    """The setting with what the model's profile says of its layers, and a line that says so.

    The profile is the file of `--sparse-profile`, or what `kvsieve calibrate` wrote beside the
    model, if it is there; one beside the model that does not fit the run is named and left out.
    Layers that the setting itself treats apart go before it.

    Raises ConfigError for a file of `--sparse-profile` that is no profile, or does not fit.
    """
    given = options.sparse_profile
    if setting is None or given == NONE or setting.layers:
        return setting

    from kvsieve.engine.model_loader import resolve_model
    from kvsieve.evals.calibration import Profile, cache_name, profile_path

    path = Path(given or profile_path(resolve_model(model.source, offline=model.offline)))
    if given is None and not path.exists():
        return setting
    try:
        profile = Profile.read(path)
        misfit = profile.misfit(
            setting, fingerprint=llm.info.fingerprint, cache_type=cache_name(llm)
        )
        if misfit is not None:
            raise ConfigError(f"--sparse-profile {path}: {misfit} ({NONE} takes no profile)")
    except ConfigError as error:
        if given is not None:
            raise
        print(f"kvsieve: profile not used: {error}", file=sys.stderr)
        return setting
    print(f"kvsieve: profile {path}: {profile.gist}", file=sys.stderr)
    return profile.applied(setting, name=path.name)


def profiled_arms(
    arms: Sequence[Arm],
    *,
    compare: ArmOptions,
    options: SparseOptions,
    llm: "LLM",
    model: ModelOptions,
) -> list[Arm]:
    """The arms; those that an `--attn` spells stay as they are spelled."""
    if compare.attn:
        return list(arms)
    return [Arm.of(profiled(arm.sparse, options=options, llm=llm, model=model)) for arm in arms]

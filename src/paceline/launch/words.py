"""A run as the words that start it: for whoever starts it later, or elsewhere."""

from __future__ import annotations

from paceline.core.settings import NAMES
from paceline.launch.spec import Away, Elastic, JobSpec, Replacing

# Options, by what has them; how many members there are is told apart.
_ELASTIC = ("replacements", "silence_s", "standbys", "listen", "port", "slots")
_AWAY = ("listen", "port")
_REPLACING = ("replacements",)


def words(spec: JobSpec, on: str) -> list[str]:
    """What stands behind `paceline run`, with settings that were pinned or are not at their default. Of the variables
    of --env only the names are there: their values are to be in the environment of whoever runs this.

    >>> words(JobSpec(script="train.py", args=("--lr", "0.1"), num_members=4, env={"KEY": "secret"}), "local")
    ['-n', '4', '--on', 'local', '--env', 'KEY', 'train.py', '--lr', '0.1']
    """
    elastic, replacing, settings = spec.elastic, spec.replacing, spec.settings
    least = elastic.least if elastic else replacing.least if replacing else spec.num_members
    most = elastic.most if elastic else spec.num_members
    found = ["-n", str(most) if least == most and not replacing else f"{least}:{most}", "--on", on]
    for given, default, names in (
        (elastic, Elastic(least=1, most=1), _ELASTIC),
        (spec.away, Away(hosts=""), _AWAY),
        (replacing, Replacing(replacements=0), _REPLACING),  # said, or nobody is replaced
        (spec if not elastic else None, JobSpec(script=""), ("silence_s",)),
    ):
        for name in names if given else ():
            if (value := getattr(given, name)) != getattr(default, name):
                found += [_option(name), _text(value)]
    found += ["--threads", str(spec.threads)] if spec.threads else []
    for option, values in (("--label", spec.labels), ("--env", spec.env)):
        found += [word for value in values for word in (option, value)]
    for name in NAMES:
        value = getattr(settings, name)
        if name in settings.pinned or name in settings.changed():
            found += [_option(name)] if value is True else [] if value is False else [_option(name), _text(value)]
    return [*found, *(["-m"] if spec.module else []), spec.script, *spec.args]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)

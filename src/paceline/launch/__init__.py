"""Start processes: what to start (`JobSpec`), and the launchers that do it. Imports no torch.

The room can be called: `paceline.launch(fn, workers=4)`, see `calling`. So the name means the same whether or not
somebody has imported the room before.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from paceline.launch.local import Local
from paceline.launch.spec import Job, JobSpec, Launcher

__all__ = ["Job", "JobSpec", "Launcher", "Local"]


class _Room(ModuleType):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        from paceline.launch.calling import launch

        return launch(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain module is pickled: functions that refer to this one are sent to members."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Room

"""Tasks that need no network, in the harness's own form: `preft_...` of `preft eval --tasks`.

Their definitions are YAML files in `preft_templates/suites`; what makes their examples and scores their answers is
here. lm-evaluation-harness finds them by `task_manager`, or by `include_path=suites_folder()`.
"""

from __future__ import annotations

from preft.eval.suites.registry import PREFIX, suites_folder, task_manager

__all__ = ["PREFIX", "suites_folder", "task_manager"]

"""All settings of a runtime as one typed page, and the ways to fill it, to check it and to show it.

Owns the import path and nothing else: `page` is the page and its errors, `names` what is known of
each name, `relations` how values must fit together, `loading` the layers.

Keeps: each of them imports only those before it, and everybody else imports from here.

Must never hold anything but these names.
"""

from .loading import load_settings
from .names import ENVIRONMENT_PREFIX, NOT_SETTINGS, Known, names_of, settings_page
from .page import Settings, SettingsError, SettingsProblem
from .relations import check_settings

__all__ = [
    "ENVIRONMENT_PREFIX",
    "NOT_SETTINGS",
    "Known",
    "Settings",
    "SettingsError",
    "SettingsProblem",
    "check_settings",
    "load_settings",
    "names_of",
    "settings_page",
]

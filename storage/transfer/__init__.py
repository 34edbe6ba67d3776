"""Export and import: the format, how it is written, how it is checked, how it becomes units."""

from .asking import Hold, Read, Release, Told, Write
from .exporting import Exporter, ExportReport, Selection
from .files import Source, open_source, output_to, written_file
from .importing import ImportReport, importing
from .limits import ImportLimits

__all__ = [
    "ExportReport",
    "Exporter",
    "Hold",
    "ImportLimits",
    "ImportReport",
    "Read",
    "Release",
    "Selection",
    "Source",
    "Told",
    "Write",
    "importing",
    "open_source",
    "output_to",
    "written_file",
]

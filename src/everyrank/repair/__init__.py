"""Patches for findings of the audit: edits of the script, each checked by another audit.

fix.py               tries edits, audits again, keeps edits that help
remedies.py          the edits to try for each finding
edited_script.py     the script with its edits
data_edits.py        edits of loaders and samplers
gradient_edits.py    edits of the loss, of backward and of clipping
replica_edits.py     edits of the wrapper, of seeds, of saving
evaluation_edits.py  edits of evaluations
"""

from everyrank.repair.fix import Patch, is_editable, patch_script

__all__ = ["Patch", "is_editable", "patch_script"]

"""Everything that imports Megatron; nothing outside this package does.

Importing it readies the machine: where there is no CUDA, the stand-in of ``cpu.py`` is put in
place before any module of Megatron is loaded.
"""

import warnings

# Megatron says for each of a dozen modules that TransformerEngine or Apex is missing; neither is
# needed here.
warnings.filterwarnings("ignore", message=".*([Tt]ransformer.[Ee]ngine|Apex)")

from kaiyuan.megatron import cpu  # noqa: E402

cpu.install()

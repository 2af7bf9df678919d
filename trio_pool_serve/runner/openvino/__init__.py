"""Forward passes by OpenVINO, on CPU.

OpenVINO and NNCF report their use over the network through ``openvino_telemetry``, unless the user has opted out in a
file in the home directory. Here they do not find that package, for which both are prepared: nothing is ever reported.
"""

import sys

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # to import it raises ModuleNotFoundError

"""Forward passes by OpenVINO, on CPU."""

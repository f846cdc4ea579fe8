"""The device that tests run on: $KVPOOL_TEST_DEVICE, by default the host backend's."""
import os

DEVICE = os.environ.get("KVPOOL_TEST_DEVICE", "host:0")
ON_GPU = DEVICE.startswith("cuda:")

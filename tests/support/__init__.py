"""Helpers of the Python tests: an independent reference, a client, a daemon to run against."""
